"""python -m ops.chaos run | quick | rolling | bugs"""

import sys

import uvloop
from cyclopts import App
from rich.console import Console

from ops.chaos.plan import Mix, Settings
from ops.chaos.scenario import run_scenario

app = App(name="chaos", help=__doc__)
console = Console()


@app.command
def run(
    *,
    requests: int = 200,
    rate: float = 20.0,
    fault_every: float = 0.0,
    engines: int = 3,
    renderers: int = 2,
    coordinators: int = 2,
    engine: str = "fake",
    renderer: str = "real",
    seed: int = 1,
    crash: str = "",
    bug: str = "",
    cancels: bool = True,
    keep: bool = False,
) -> int:
    mix = Mix() if cancels else Mix(cancel=0, deadline=0, follow=0)
    s = Settings(
        seed=seed,
        requests=requests,
        rate=rate,
        fault_every_s=fault_every,
        engines=engines,
        renderers=renderers,
        coordinators=coordinators,
        engine=engine,
        renderer=renderer,
        crash=crash,
        bug=bug,
        mix=mix,
    )
    verdict, folder = uvloop.run(run_scenario(s, keep=keep))
    for v in verdict.violations[:20]:
        console.print(str(v), highlight=False, markup=False)
    console.print(
        len(verdict.violations), "violations", verdict.figures, verdict.counts, str(folder)
    )
    return 0 if verdict.clean else 1


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))
