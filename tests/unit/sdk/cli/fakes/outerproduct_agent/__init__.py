"""An agent as far as `outerproduct up` looks at it. See __main__.py."""
