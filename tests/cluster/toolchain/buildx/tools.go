//go:build tools

// Package tools pins what the tests build.
package tools

import (
	_ "github.com/docker/buildx/cmd/buildx"
)
