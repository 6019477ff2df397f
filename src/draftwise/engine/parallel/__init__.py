"""Steps that use several cores, devices or processes, built on the plain step loop."""
