"""The command `pagemill`; its commands are in `workers.cli.commands`."""

import sys
from importlib.metadata import version

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    CycloptsPanel,
    Group,
    Parameter,
    UnknownCommandError,
    UnusedCliTokensError,
)
from rich.panel import Panel

from shared.helpers.validation import TYPES
from shared.stage import signals
from workers.cli.terminal import EXIT_INTERRUPTED, run_app

# A command's module is imported when the command runs. All of them together take half a second of
# processor time, and a container's health check runs every few seconds.
COMMANDS = {
    "Start": {
        "run:run": ("run Qwen/Qwen2-VL-2B-Instruct", 'run ./my-model "What is in @photo.png?"'),
        "models:pull": (
            "pull Qwen/Qwen2-VL-2B-Instruct",
            "pull org/name --revision v2 --dir /srv/name",
        ),
        "serve:up": ("up", "up --pull Qwen/Qwen2-VL-2B-Instruct"),
        "models:models": ("models", "models --json"),
        "chat:chat": ("chat", 'chat --system "Answer in one sentence."'),
        "requests:ask": (
            'ask "What color is this? @red.png"',
            'git diff | pagemill ask "Describe this change: @-"',
        ),
    },
    "Ask": {
        "speech:say": ('say "three red circles" -o out.wav', "say @notes.txt --voice alloy"),
        "painting:draw": (
            'draw "a red circle on blue" -o out.png',
            'draw "make it green @out.png" --model qwen-image-edit',
        ),
        "batch:batch": (
            "batch run questions.jsonl -o answers.jsonl --up",
            'batch make scans/ --prompt "Read the text" > questions.jsonl',
        ),
    },
    "Requests": {
        "listing:requests": ("requests --state running", "requests --follow"),
        "requests:where": ("where req-3f2a9c51d0b84e67", "where req-3f2a9c51d0b84e67 --json"),
        "requests:follow": (
            "follow req-3f2a9c51d0b84e67",
            "follow req-3f2a9c51d0b84e67 --from 12 --json",
        ),
        "requests:cancel": ("cancel req-3f2a9c51d0b84e67", "cancel req-3f2a9c51d0b84e67@acme"),
        "preview:render": ('render "What is this? @photo.png"', 'render "Hello" --json'),
        "preview:tokenize": ('tokenize "What can you do?"', "tokenize @notes.txt --json"),
    },
    "Watch": {
        "observe:top": ("top", "top --once --json"),
        "logs:logs": ("logs -f --level warning", "logs --request req-3f2a9c51d0b84e67 -n 200"),
        "observe:metrics": ("metrics", "metrics --listen 127.0.0.1:9400"),
        "health:health": ("health", "health engine --ready"),
        "doctor:doctor": ("doctor", "doctor --json"),
    },
    "Operate": {
        "worker:worker": (
            "worker engine --model demo --nats nats://10.0.0.5:4222",
            "worker gateway --config /etc/pagemill.yaml",
        ),
        "configure:check": ("check", "check --kernels"),
        "scale:scale": ("scale engine=2", "scale engine=auto"),
        "dead:dead": ("dead list", "dead requeue req-3f2a9c51d0b84e67 --edit"),
        "upgrade:upgrade": ("upgrade", "upgrade --json"),
        "migrate:migrate": ("migrate", "migrate --yes"),
        "backup:backup": ("backup /srv/pagemill.zip", "backup /srv/pagemill"),
        "backup:restore": ("restore /srv/pagemill.zip", "restore /srv/pagemill.zip --replace"),
        "audit:audit": ("audit", "audit --action cancel --since 2026-11-01"),
        "configure:key": ("key alice", "key prometheus --right metrics"),
        "keys:keys": ("keys make", "keys add-tenant acme"),
        "kubernetes:manifests": (
            "manifests | kubectl apply -f -",
            "manifests --for-helm > values.yaml",
        ),
        "completion:completion": (
            "completion bash > ~/.local/share/bash-completion/completions/pagemill",
            "completion fish > ~/.config/fish/completions/pagemill.fish",
        ),
    },
}
EXAMPLES = {path.partition(":")[2]: e for paths in COMMANDS.values() for path, e in paths.items()}


# Commands of Ollama and vLLM, and what does the same here.
OTHERS = {
    "bench": "top",
    "complete": "ask",
    "cp": "models",
    "create": "check (a model is a section of pagemill.yaml)",
    "generate": "ask",
    "list": "models",
    "ls": "models",
    "ps": "top",
    "rm": "models (`hf cache rm model/NAME` removes the files)",
    "serve": "up",
    "show": "check",
    "start": "up",
    "status": "top",
    "stop": "up (Ctrl-C in its terminal stops it)",
}


def show_error(error: CycloptsError) -> Panel:
    """Return an error of a command or an option in the words of the other errors."""
    words = error.unused_tokens or [""]
    if isinstance(error, UnknownCommandError) and words[0] in OTHERS:
        return CycloptsPanel(f'There is no command "{words[0]}": see pagemill {OTHERS[words[0]]}.')
    if isinstance(error, UnusedCliTokensError):
        return CycloptsPanel(
            f'Too many arguments: "{" ".join(words)}". A text of several words needs quotation'
            " marks, and files are named in it, such as @photo.png."
        )
    if isinstance(error, CoercionError) and error.token is not None and error.msg is None:
        name = getattr(error.target_type, "__name__", "")
        if name in TYPES:
            error.msg = f'must be {TYPES[name]}, not "{error.token.value}"'
    return CycloptsPanel(error)


app = App(
    error_formatter=show_error,
    name="pagemill",
    help="A durable, queue-native serving system for multimodal language models.",
    help_epilogue="`pagemill COMMAND --help` has two examples of each command.",
    version=version("pagemill"),
    default_parameter=Parameter(negative=()),
)
for title, paths in COMMANDS.items():
    group = Group.create_ordered(title)
    for order, path in enumerate(paths):
        app.command(f"workers.cli.commands.{path}", group=group, sort_key=order)
options = Group.create_ordered("Options")
for flag in (*app.help_flags, *app.version_flags):
    app[flag].group = options


def add_examples(command: str) -> None:
    """Add its examples to the help of a command."""
    lines = (e if "pagemill " in e else f"pagemill {e}" for e in EXAMPLES[command])
    app[command].help_epilogue = "\n".join(["Examples:", "", *(f"    {line}" for line in lines)])


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        signals.end_at_once()
    try:
        if not sys.argv[1:] or sys.argv[1] in app.help_flags:
            app.resolved_commands()  # The help has one line for each command.
        elif sys.argv[1] in EXAMPLES and not {*app.help_flags}.isdisjoint(sys.argv[2:]):
            add_examples(sys.argv[1])
        run_app(app)
    except KeyboardInterrupt:  # While modules of commands are imported.
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
