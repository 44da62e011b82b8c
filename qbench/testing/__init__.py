"""What the project's own tests build on: tiny graphs, and contracts to pass."""
