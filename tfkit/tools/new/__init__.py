"""New projects, from templates."""
