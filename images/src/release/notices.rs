//! THIRD_PARTY_NOTICES: licences of everything in the images.

use std::{collections::BTreeMap, fmt::Write, fs, path::Path};

use super::{crates::Crate, debian::Package};
use crate::error::{At, Result};

/// Begin of the names of files with licences and notices.
const FILES: [&str; 6] = ["license", "licence", "copying", "copyright", "notice", "unlicense"];

/// Limits the size of a licence file. The longest one here has 35 KiB.
const MAX_SIZE: u64 = 1 << 20;

/// Reads the licence files of a crate, and those of the folder `LICENSES`.
pub(super) fn licence_texts(folder: &Path) -> Result<Vec<String>> {
    let mut paths = Vec::new();
    for folder in [folder.to_owned(), folder.join("LICENSES")] {
        let all = folder.ends_with("LICENSES");
        if !folder.is_dir() {
            continue;
        }
        for entry in fs::read_dir(&folder).at(&folder)? {
            let path = entry.at(&folder)?.path();
            if (all || is_licence(&path))
                && fs::metadata(&path).is_ok_and(|data| data.is_file() && data.len() < MAX_SIZE)
            {
                paths.push(path);
            }
        }
    }
    paths.sort();
    paths.iter().map(|path| Ok(String::from_utf8_lossy(&fs::read(path).at(path)?).into_owned())).collect()
}

fn is_licence(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    FILES.iter().any(|file| name.starts_with(file)) && !name.ends_with(".rs")
}

/// Adds texts for crates whose published sources have none: those of crates from the same repository, else `apache` if that
/// licence may be chosen.
pub(super) fn complete(crates: &mut [(Crate, Vec<String>)], apache: &str) {
    let by_repository: BTreeMap<String, Vec<String>> = crates
        .iter()
        .filter(|(_, texts)| !texts.is_empty())
        .filter_map(|(krate, texts)| Some((krate.repository.clone()?, texts.clone())))
        .collect();
    for (krate, texts) in crates.iter_mut().filter(|(_, texts)| texts.is_empty()) {
        let same = krate.repository.as_ref().and_then(|repository| by_repository.get(repository));
        if let Some(same) = same {
            texts.clone_from(same);
        } else if krate.licence.as_ref().is_some_and(|licence| licence.split(' ').any(|id| id == "Apache-2.0")) {
            texts.push(apache.to_owned());
        }
    }
}

/// Returns the document. Equal texts appear once.
pub(super) fn text(crates: &[(Crate, Vec<String>)], packages: &BTreeMap<Package, Vec<&str>>) -> String {
    let mut numbers: BTreeMap<String, usize> = BTreeMap::new();
    let mut texts: Vec<&str> = Vec::new();
    let mut out = String::from(
        "Ferrovirt is licensed under Apache-2.0. Its images contain the following software of others.\n\n\
         RUST CRATES\n\nThe numbers refer to the texts at the end.\n\n",
    );
    for (krate, licences) in crates {
        let mut of_crate = Vec::new();
        for licence in licences {
            let next = numbers.len() + 1;
            let number = *numbers.entry(words(licence)).or_insert_with(|| {
                texts.push(licence);
                next
            });
            of_crate.push(format!("[{number}]"));
        }
        if of_crate.is_empty() {
            of_crate.push("(its sources have no text)".to_owned());
        }
        let expression = krate.licence.as_deref().unwrap_or("no licence stated");
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{} {}: {expression} {}", krate.name, krate.version, of_crate.join(" "));
    }
    out.push_str(
        "\nDEBIAN PACKAGES\n\nTheir licences are in /usr/share/doc/PACKAGE/copyright of the named images, and of the Debian \
         packages.\n\n",
    );
    for (package, images) in packages {
        let source = package.source.as_ref().map(|source| format!(" (source: {source})")).unwrap_or_default();
        let _ = writeln!(
            out,
            "{} {}{source}: /usr/share/doc/{}/copyright in {}",
            package.name,
            package.version,
            package.name,
            images.join(", ")
        );
    }
    out.push_str("\nTEXTS\n");
    for (index, text) in texts.iter().enumerate() {
        let _ = write!(out, "\n[{}]\n\n{}\n", index + 1, text.trim_end());
    }
    out
}

/// Returns a text without differences in line breaks, by which equal licences are found.
fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn krate(name: &str) -> Crate {
        Crate {
            name: name.to_owned(),
            version: "1.0.0".to_owned(),
            licence: Some("MIT".to_owned()),
            folder: "/x".into(),
            repository: Some("https://example.com/all".to_owned()),
            ours: false,
        }
    }

    #[test]
    fn equal_texts_appear_once() {
        let crates = [
            (krate("a"), vec!["Permission is\n granted".to_owned(), "Notice of a".to_owned()]),
            (krate("b"), vec!["Permission  is granted\n".to_owned()]),
            (krate("c"), vec![]),
        ];
        let package = Package {
            name: "libc6".to_owned(),
            version: "2.41".to_owned(),
            architecture: "amd64".to_owned(),
            source: Some("glibc".to_owned()),
            maintainer: String::new(),
        };
        let text = text(&crates, &[(package, vec!["virt-api", "virt-handler"])].into());
        assert!(
            text.contains("a 1.0.0: MIT [1] [2]\nb 1.0.0: MIT [1]\nc 1.0.0: MIT (its sources have no text)\n"),
            "{text}"
        );
        assert!(
            text.contains("libc6 2.41 (source: glibc): /usr/share/doc/libc6/copyright in virt-api, virt-handler\n")
        );
        assert_eq!(text.matches("granted").count(), 1);
    }

    #[test]
    fn missing_texts_come_from_the_same_repository_or_are_the_standard_one() {
        let other =
            |name: &str, licence: &str| Crate { repository: None, licence: Some(licence.to_owned()), ..krate(name) };
        let mut crates = [
            (krate("a"), vec!["text of a".to_owned()]),
            (krate("b"), vec![]),
            (other("c", "MIT OR Apache-2.0"), vec![]),
            (other("d", "MIT"), vec![]),
        ];
        complete(&mut crates, "Apache");
        let texts: Vec<Vec<String>> = crates.into_iter().map(|(_, texts)| texts).collect();
        assert_eq!(texts, [vec!["text of a"], vec!["text of a"], vec!["Apache"], vec![]]);
    }

    #[test]
    fn licence_files_are_found_by_their_names() {
        let folder = std::env::temp_dir().join(format!("ferrovirt-images-notices-{}", std::process::id()));
        fs::create_dir_all(folder.join("LICENSES")).unwrap();
        for (name, text) in
            [("LICENSE-MIT", "1"), ("COPYING", "0"), ("license.rs", "x"), ("README", "x"), ("LICENSES/MIT.txt", "2")]
        {
            fs::write(folder.join(name), text).unwrap();
        }
        assert_eq!(licence_texts(&folder).unwrap(), ["0", "1", "2"]);
        fs::remove_dir_all(folder).unwrap();
    }
}
