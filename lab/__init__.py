"""Programs behind the published numbers. Run them as `python -m lab.NAME`."""
