"""What all tests share: the toy decoder is imported as `toy_decoder`, plain models likewise."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))


def pytest_terminal_summary(terminalreporter):
    """What tests measured (`record_property("measured", ...)`), also when all pass and nothing else is shown."""
    reports = [r for status in ("passed", "failed") for r in terminalreporter.stats.get(status, [])]
    lines = [value for r in reports if r.when == "call" for name, value in r.user_properties if name == "measured"]
    if lines:
        terminalreporter.section("measured")
        for line in lines:
            terminalreporter.write_line(line)
