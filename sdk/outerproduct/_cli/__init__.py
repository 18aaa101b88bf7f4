"""The command line `outerproduct`. Not mounted into containers."""
