//go:build tools

// Package tools pins the other helm that installs the chart.
package tools

import (
	_ "helm.sh/helm/v4/cmd/helm"
)
