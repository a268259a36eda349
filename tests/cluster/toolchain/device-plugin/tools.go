//go:build tools

// Package tools pins NVIDIA's device plugin, which loads whatever libnvidia-ml.so.1 it finds.
package tools

import (
	_ "github.com/NVIDIA/k8s-device-plugin/cmd/nvidia-device-plugin"
)
