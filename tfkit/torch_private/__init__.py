"""The private names of torch that tfkit uses: only here, with a file for each purpose.

torch may change a private name in any version. So each file says why no public name serves, and `tests/torch_private`
asserts the behaviour that tfkit relies on: with another torch, run these tests first
(`make test TORCH=2.15.0 ARGS=tests/torch_private`). All hold from the oldest to the newest version that
pyproject.toml allows, unless a file says otherwise. Nothing here imports tfkit.
"""
