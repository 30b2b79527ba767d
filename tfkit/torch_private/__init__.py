"""All private names of torch that tfkit uses, with a file for each purpose.

torch may change a private name in any version. Each file therefore explains why no public name suffices, and
`tests/torch_private` tests the behaviour on which tfkit relies. With a different version of torch, run these tests
first: `make test TORCH=2.15.0 ARGS=tests/torch_private`. Every file works with all versions that pyproject.toml allows,
unless its docstring states an exception. Nothing here imports tfkit.
"""
