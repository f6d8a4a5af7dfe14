//! Images of launcher pods.

use std::sync::Arc;

use api::VirtualMachineInstanceSpec;

use crate::options::Options;

/// The images of an installation: QEMU for another architecture is in an image of its own. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LauncherImages {
    plain: Arc<str>,
    arm64: Arc<str>,
}

impl LauncherImages {
    /// Returns those of the command line.
    pub(crate) fn new(options: &Options) -> Self {
        Self { plain: options.launcher_image.as_str().into(), arm64: options.launcher_image_arm64.as_str().into() }
    }

    /// Returns the image for guests of the nodes' architecture, whose programs other pods use, too.
    pub(crate) fn plain(&self) -> &str {
        &self.plain
    }

    /// Returns the image for a VMI. Empty: the installation has none.
    pub(crate) fn of(&self, spec: &VirtualMachineInstanceSpec) -> &str {
        if spec.is_arm64() { &self.arm64 } else { &self.plain }
    }

    #[cfg(test)]
    pub(crate) fn of_tests(plain: &str) -> Self {
        Self { plain: plain.into(), arm64: format!("{plain}-arm64").into() }
    }
}
