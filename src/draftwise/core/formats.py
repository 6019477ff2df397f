"""Names of the number formats that a user can request."""

# Integer weights of 8 or 4 bits. A user appends the format to a model name.
QUANTIZATIONS = ("int8", "int4")
