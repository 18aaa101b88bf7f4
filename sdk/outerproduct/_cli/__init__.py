"""The command `outerproduct`. `main.py` has the list of commands; each family is a module of its own."""
