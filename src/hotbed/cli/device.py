# SPDX-License-Identifier: Apache-2.0
"""What `hotbed doctor --device` prints of the checks of a device."""

from __future__ import annotations

from rich.markup import escape

from hotbed.cli.show import print_line
from hotbed.training.device_checks.checks import DeviceChecks
from hotbed.training.devices import find_device


def print_checks(name: str) -> bool:
    """Check a device, print what each check finds, and return whether it may be trained on.

    Raises:
        ConfigError: there is no such device.
    """
    device = find_device("--device", name)
    checks = DeviceChecks(device)
    print_line(f"{escape(checks.device_name)}: this takes up to two minutes")
    findings = []
    for finding in checks.run():
        findings.append(finding)
        mark = "[green]passed[/green]" if finding.passed else "[red]FAILED[/red]"
        print_line(f"{mark} {finding.check}: {escape(finding.text)} ({finding.seconds:.1f} s)")
    failed = [finding.check for finding in findings if not finding.passed]
    if failed:
        print_line(
            f"{device} failed {len(failed)} of {len(findings)} checks: {', '.join(failed)}. Do not "
            "train on it: update its driver and torch, then report what is printed here."
        )
    else:
        print_line(f"{device} passed all {len(findings)} checks.")
    return not failed
