module holdfast.dev/tests/small

go 1.26.0
