"""``python -m reroll``: planning without a model, calibration, the list of passes, a doctor."""

from reroll.report.cli.commands import main

if __name__ == "__main__":
    raise SystemExit(main())
