//! Placeholders for libraries that programs of an image link and never use.
//!
//! A process maps, relocates and keeps in memory every library that it links, whether it calls it or not. A placeholder has the
//! name, the symbols and the versions of a library and no code: a call ends the process with an illegal instruction.

use std::{fs, path::Path};

use crate::{
    cache::{Cache, Key},
    error::{At, Error, Result},
    object::{self, Export},
    packages::Root,
    run, tools,
    tree::Tree,
};

/// Directory of libraries.
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

/// A library that is replaced.
#[derive(Debug)]
pub(crate) struct Placeholder {
    /// Name under which programs load it.
    pub library: &'static str,
    /// Functions that programs call at their start, and those whose null pointer they handle; they return 0.
    pub called: &'static [&'static str],
    /// Functions whose failure programs handle; they return 1.
    pub failing: &'static [&'static str],
}

impl Placeholder {
    /// Returns the placeholder of a library of which no function is called.
    pub(crate) const fn unused(library: &'static str) -> Self {
        Self { library, called: &[], failing: &[] }
    }
}

/// Returns the placeholders as files of an image.
pub(crate) fn tree(cache: &Cache, root: &Root, placeholders: &[Placeholder]) -> Result<Tree> {
    let mut tree = Tree::default();
    for placeholder in placeholders {
        let path = format!("{LIBRARIES}/{}", placeholder.library);
        let real = root.path.join(&path);
        let exports = object::exports(&fs::read(&real).at(&real)?)
            .map_err(|source| Error::Elf { object: path.clone(), source })?;
        let (assembly, versions) = sources(&exports, placeholder);
        let key = Key::default().with(placeholder.library).with(&assembly).with(&versions).finish();
        let entry =
            cache.entry("placeholders", &key, |dir| link(cache, dir, placeholder.library, &assembly, &versions))?;
        tree.copy(&path, 0o644, 0, entry.join(placeholder.library));
    }
    Ok(tree)
}

/// Returns the assembly code and the linker's version script.
fn sources(exports: &[Export], placeholder: &Placeholder) -> (String, String) {
    let mut assembly = String::from(
        ".text\nunused: ud2\ncalled: xor %eax, %eax\n ret\nfailing: mov $1, %eax\n ret\n.bss\nobject: .zero 64\n\
         .section .note.GNU-stack,\"\",@progbits\n",
    );
    let mut versions = std::collections::BTreeMap::<&str, Vec<&str>>::new();
    for Export { name, version, is_object } in exports {
        let (kind, target) = match is_object {
            true => ("object", "object"),
            false if placeholder.called.contains(&name.as_str()) => ("function", "called"),
            false if placeholder.failing.contains(&name.as_str()) => ("function", "failing"),
            false => ("function", "unused"),
        };
        assembly.push_str(&format!(".globl {name}\n.type {name}, @{kind}\n.set {name}, {target}\n"));
        if let Some(version) = version {
            versions.entry(version).or_default().push(name);
        }
    }
    let script = versions.into_iter().map(|(version, names)| format!("{version} {{ {}; }};\n", names.join("; ")));
    (assembly, script.collect())
}

fn link(cache: &Cache, dir: &Path, library: &str, assembly: &str, versions: &str) -> Result<()> {
    let tools = tools::root(cache)?;
    let file = |name: &str, text: &str| {
        let path = dir.join(name);
        fs::write(&path, text).at(&path).map(|()| path)
    };
    let (source, script) = (file("code.s", assembly)?, file("versions", versions)?);
    let object = dir.join("code.o");
    let hint = "from Debian package binutils";
    let mut assemble = run::from_root(&tools.path, "usr/bin/x86_64-linux-gnu-as");
    run::run(assemble.arg("-o").arg(&object).arg(source), hint)?;
    let mut link = run::from_root(&tools.path, "usr/bin/x86_64-linux-gnu-ld");
    link.args(["-shared", "--hash-style=gnu", "-z", "relro", "-z", "noexecstack", "-z", "noseparate-code"]);
    link.args(["--strip-all", "-soname", library]);
    if !versions.is_empty() {
        link.arg("--version-script").arg(script);
    }
    run::run(link.arg("-o").arg(dir.join(library)).arg(object), hint).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_of_an_unused_function_ends_the_process_and_one_that_programs_expect_does_not() {
        let export = |name: &str, version: Option<&str>, is_object| Export {
            name: name.to_owned(),
            version: version.map(str::to_owned),
            is_object,
        };
        let exports = [
            export("start", Some("A_1"), false),
            export("get", Some("A_2"), false),
            export("open", Some("A_2"), false),
            export("plain", None, false),
            export("data", Some("A_2"), true),
        ];
        let placeholder = Placeholder { called: &["start"], failing: &["open"], ..Placeholder::unused("libx.so.1") };
        let (assembly, versions) = sources(&exports, &placeholder);
        for line in
            [".set start, called", ".set get, unused", ".set open, failing", ".set plain, unused", ".set data, object"]
        {
            assert!(assembly.contains(line), "{line}");
        }
        assert_eq!(versions, "A_1 { start; };\nA_2 { get; open; data; };\n");
    }
}
