# docker buildx bake -f docker/docker-bake.hcl [TARGET ...]      from the repository's root
#
# Variables come from the environment: REGISTRY=registry.example.org/team/ TAG=0.1.0 docker buildx bake ...

variable "REGISTRY" {
  default     = ""
  description = "Prefix of the image names, with its closing slash."
}

variable "TAG" {
  default = "0.1"
}

variable "VERSION" {
  default = "0.1.0"
}

variable "REVISION" {
  default     = "unknown"
  description = "The commit, for the image's label."
}

variable "TRAINER_BASE" {
  default     = ""
  description = "Another base for the trainer; empty takes the Dockerfile's own."
}

variable "DEVEL_BASE" {
  default     = ""
  description = "Another base for trainer-devel, of the same release as the trainer's: both need one Python."
}

variable "CONTROLLER_BASE" {
  default = ""
}

group "default" {
  targets = ["trainer", "controller"]
}

group "all" {
  targets = ["trainer", "trainer-compile", "trainer-devel", "controller"]
}

target "image" {
  context = "."
  args = {
    VERSION  = VERSION
    REVISION = REVISION
  }
  attest = [
    "type=sbom",
    "type=provenance,mode=max",
  ]
}

target "trainer" {
  inherits   = ["image"]
  dockerfile = "docker/trainer.Dockerfile"
  target     = "runtime"
  args       = notequal(TRAINER_BASE, "") ? { BASE_IMAGE = TRAINER_BASE } : {}
  tags       = ["${REGISTRY}holdfast-trainer:${TAG}"]
}

# With g++ and Python's headers, for jobs that use torch.compile.
target "trainer-compile" {
  inherits = ["trainer"]
  args     = { COMPILER = "1" }
  tags     = ["${REGISTRY}holdfast-trainer:${TAG}-compile"]
}

# With nvcc, headers and build tools, for building extensions.
target "trainer-devel" {
  inherits = ["trainer"]
  target   = "devel"
  args     = notequal(DEVEL_BASE, "") ? { DEVEL_IMAGE = DEVEL_BASE } : {}
  tags     = ["${REGISTRY}holdfast-trainer:${TAG}-devel"]
}

target "controller" {
  inherits   = ["image"]
  dockerfile = "docker/controller.Dockerfile"
  target     = "runtime"
  args       = notequal(CONTROLLER_BASE, "") ? { BASE_IMAGE = CONTROLLER_BASE } : {}
  tags       = ["${REGISTRY}holdfast-controller:${TAG}"]
}
