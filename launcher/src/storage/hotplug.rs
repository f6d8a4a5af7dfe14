//! Hot-plugged volumes in the pod.

use super::{
    Backend, DiskSource,
    image::{self, ImageFormat},
};
use crate::paths::Paths;

/// Returns the device or image of a hot-plugged volume; `None` if the pod does not have it.
pub(crate) fn hotplugged_source(volume: &str, paths: &Paths) -> Option<DiskSource> {
    if !Paths::is_single_component(volume) {
        return None;
    }
    let (device, file) = (paths.hotplugged(volume, true), paths.hotplugged(volume, false));
    let source = |backend, path: &std::path::Path| DiskSource {
        preallocated: image::is_preallocated(path),
        ..DiskSource::new(backend, image::supports_direct_io(path))
    };
    if image::is_block_device(&device) {
        return Some(source(Backend::Block { path: device.clone() }, &device));
    }
    // Raw, whatever its first bytes are: the disk belongs to the guest. An empty file waits for virt-handler's mount.
    let has_image = std::fs::metadata(&file).is_ok_and(|meta| meta.is_file() && meta.len() > 0);
    has_image.then(|| source(Backend::File { path: file.clone(), format: ImageFormat::Raw }, &file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_counts_once_it_has_content_and_other_names_never() {
        let root = std::env::temp_dir().join(format!("launcher-hotplug-{}", std::process::id()));
        std::fs::create_dir_all(&root).unwrap();
        let paths = Paths { hotplug_disks: root.clone(), ..Paths::default() };
        std::fs::write(root.join("empty.img"), "").unwrap();
        std::fs::write(root.join("full.img"), [0; 512]).unwrap();
        // No device, although it has the name of one.
        std::fs::write(root.join("plain"), [0; 512]).unwrap();
        for (volume, known) in [("absent", false), ("empty", false), ("full", true), ("plain", false), ("../x", false)]
        {
            assert_eq!(hotplugged_source(volume, &paths).is_some(), known, "{volume}");
        }
        let backend = hotplugged_source("full", &paths).unwrap().backend;
        assert_eq!(backend, Backend::File { path: root.join("full.img"), format: ImageFormat::Raw });
        std::fs::remove_dir_all(root).unwrap();
    }
}
