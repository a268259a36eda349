//go:build tools

// Package tools pins what the tests build.
package tools

import (
	_ "github.com/kubeflow/training-operator/cmd/training-operator.v1"
)
