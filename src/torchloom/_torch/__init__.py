"""The only door to private torch: `table` lists each name, one module per area uses it."""
