"""The scheduling core: pure Python on ints, time as an argument, nothing outside the standard library."""
