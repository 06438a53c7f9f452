"""The generator: declared matrix -> legality -> selection -> rendering -> writing. Needs jinja2 and click only."""
