//! Kernel of the tools and its modules.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    error::{At, Error, Result},
    packages::Root,
    run,
    tree::Tree,
};

/// A kernel in a root.
pub(super) struct Kernel {
    root: PathBuf,
    version: String,
    /// Path of its file.
    pub image: PathBuf,
}

impl Kernel {
    /// Returns the newest kernel of a root.
    pub(super) fn find(root: &Root) -> Result<Self> {
        let boot = root.path.join("boot");
        let mut names = Vec::new();
        for entry in fs::read_dir(&boot).at(&boot)? {
            names.push(entry.at(&boot)?.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        names
            .iter()
            .rev()
            .find_map(|name| {
                let version = name.strip_prefix("vmlinuz-")?.to_owned();
                Some(Self { root: root.path.clone(), image: boot.join(name), version })
            })
            .ok_or_else(|| Error::NothingSelected { pattern: "vmlinuz-*".to_owned(), root: boot })
    }
}

/// Returns modules and their dependencies, uncompressed, with the index files of modprobe. Whole modules, which keep their
/// signature, are larger and load more slowly; a kernel that was started by secure boot loads no other.
pub(super) fn modules(tools: &Root, kernel: &Kernel, names: &[&str], whole: bool, work: &Path) -> Result<Tree> {
    let all = work.join("all-modules");
    depmod(tools, &kernel.root, &all, &kernel.version)?;
    let index = format!("lib/modules/{}", kernel.version);
    let dep_path = all.join(&index).join("modules.dep");
    let dep = fs::read_to_string(&dep_path).at(&dep_path)?;
    let mut chosen = Vec::new();
    for name in names {
        let line = dep.lines().find(|line| module_name(line.split(':').next().unwrap_or(line)) == *name);
        match line {
            Some(line) => chosen.extend(line.replace(':', "").split_whitespace().map(str::to_owned)),
            // Built into the kernel.
            None if is_builtin(&kernel.root.join(&index), name)? => {}
            None => return Err(Error::NothingSelected { pattern: format!("module {name}"), root: all }),
        }
    }
    chosen.sort();
    chosen.dedup();

    let small = work.join("modules");
    let mut tree = Tree::default();
    for module in &chosen {
        let from = kernel.root.join(&index).join(module);
        let path = format!("{index}/{}", module.trim_end_matches(".xz"));
        let mut command = Command::new(tools.path.join("usr/bin/busybox"));
        let content = if module.ends_with(".xz") {
            run::run(command.args(["xzcat"]).arg(&from), "from Debian package busybox-static")?
        } else {
            fs::read(&from).at(&from)?
        };
        let content = if whole { content } else { slim(tools, work, &content)? };
        let to = small.join(&path);
        if let Some(parent) = to.parent() {
            fs::create_dir_all(parent).at(parent)?;
        }
        fs::write(&to, &content).at(&to)?;
        tree.file(&format!("usr/{path}"), 0o644, content);
    }
    for file in ["modules.order", "modules.builtin"] {
        let (from, to) = (kernel.root.join(&index).join(file), small.join(&index).join(file));
        fs::copy(&from, &to).at(&to)?;
    }
    depmod(tools, &small, &small, &kernel.version)?;
    for file in ["modules.dep", "modules.alias"] {
        let from = small.join(&index).join(file);
        tree.file(&format!("usr/{index}/{file}"), 0o644, fs::read(&from).at(&from)?);
    }
    Ok(tree)
}

/// Sections for debuggers, tracers and mitigations that the guest does not use. Reading them takes most of the time of loading a
/// module under emulation.
const UNUSED_SECTIONS: [&str; 7] =
    [".BTF", ".call_sites", ".return_sites", ".retpoline_sites", ".orc_unwind", ".orc_unwind_ip", "__mcount_loc"];

/// Returns a module without these sections and without its signature, which the kernel does not require.
fn slim(tools: &Root, work: &Path, module: &[u8]) -> Result<Vec<u8>> {
    let (from, to) = (work.join("module.ko"), work.join("slim.ko"));
    fs::write(&from, module).at(&from)?;
    let mut command = run::from_root(&tools.path, "usr/bin/x86_64-linux-gnu-objcopy");
    for section in UNUSED_SECTIONS {
        command.arg(format!("--remove-section={section}"));
    }
    run::run(command.arg(&from).arg(&to), "from Debian package binutils")?;
    fs::read(&to).at(&to)
}

/// Returns the name of a module from the path of its file.
fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split(".ko").next().unwrap_or(file).replace('-', "_")
}

fn is_builtin(index: &Path, name: &str) -> Result<bool> {
    let path = index.join("modules.builtin");
    Ok(fs::read_to_string(&path).at(&path)?.lines().any(|line| module_name(line) == name))
}

fn depmod(tools: &Root, base: &Path, out: &Path, version: &str) -> Result<()> {
    fs::create_dir_all(out).at(out)?;
    let mut command = run::from_root(&tools.path, "usr/sbin/depmod");
    command.arg("-b").arg(base).arg("-o").arg(out).arg(version);
    run::run(&mut command, "from Debian package kmod")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn module_files_and_names_are_matched() {
        assert_eq!(module_name("kernel/drivers/char/hw_random/virtio-rng.ko.xz"), "virtio_rng");
        assert_eq!(module_name("kernel/fs/isofs/isofs.ko"), "isofs");
    }
}
