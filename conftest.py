"""Files without doctests that cannot be imported everywhere: they need the extra `ray`."""

collect_ignore = [f"saguaro/cluster/{name}.py" for name in ("application", "launch", "replica", "router")]
