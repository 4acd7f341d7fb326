"""The command `pagemill doctor`."""

from workers.cli.doctor import examine
from workers.cli.options import ConfigFile, NatsUrl
from workers.cli.terminal import print_json, print_line


async def doctor(*, json: bool = False, config: ConfigFile = None, nats: NatsUrl = None) -> int:
    """Check versions, kernels, devices, disk, keys, models, broker, ports and page.

    Each line is a finding, with the remedy if there is one. The exit code is 1 if a check failed.
    Nothing is changed.

    Parameters
    ----------
    json
        Print one JSON object per line.
    """
    code = 0
    async for finding in examine(config, nats):
        remedy = f": {finding.remedy}" if finding.remedy else ""
        line = f"{finding.state:<7} {finding.check:<9} {finding.text}{remedy}"
        print_json(finding._asdict()) if json else print_line(line)
        code = max(code, int(finding.state == "failed"))
    return code
