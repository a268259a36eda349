//go:build tools

// Package tools pins what checks rendered manifests against schemas.
package tools

import (
	_ "github.com/yannh/kubeconform/cmd/kubeconform"
)
