"""The folder of an exit of a target."""
