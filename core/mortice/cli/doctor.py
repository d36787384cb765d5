"""`mortice doctor`: what this machine has, what is missing, and the remedy."""

from __future__ import annotations

from mortice.cli.output import print_json, print_table


def doctor(*, json: bool = False) -> int:
    """Show backend, BLAS with its measured speed, versions and plugins. Exit code 1 where something needs a remedy.

    Parameters
    ----------
    json
        Print JSON.
    """
    from mortice.doctor import examine

    findings = examine()
    if json:
        print_json([{"what": f.what, "found": f.found, "remedy": f.remedy} for f in findings])
    else:
        rows = []
        for f in findings:
            rows.append((f.what, f.found))
            if f.remedy:
                rows.append(("", f"remedy: {f.remedy}"))
        print_table(None, ("", ""), rows)
    return 1 if any(f.remedy for f in findings) else 0
