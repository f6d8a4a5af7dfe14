//! Files that the local server sends: the pages, and those of npm packages, from memory.

use std::{collections::HashMap, io::Read};

use bytes::Bytes;
use flate2::read::GzDecoder;

use crate::Error;

/// Files of the packages, selected by `build.rs`.
const PACKED: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/packages.tar.gz"));
/// The packages: name, version, licence, integrity, source, files.
const PACKAGES: &str = include_str!("packages/packages.tsv");

/// Files of the pages.
const PAGES: [(&str, &str); 10] = [
    ("index.html", include_str!("page/index.html")),
    ("console.html", include_str!("page/console.html")),
    ("display.html", include_str!("page/display.html")),
    ("style.css", include_str!("page/style.css")),
    ("list.js", include_str!("page/list.js")),
    ("table.js", include_str!("page/table.js")),
    ("rows.js", include_str!("page/rows.js")),
    ("server.js", include_str!("page/server.js")),
    ("console.js", include_str!("page/console.js")),
    ("display.js", include_str!("page/display.js")),
];

/// Types of files by the ends of their names.
const TYPES: [(&str, &str); 5] = [
    (".html", "text/html; charset=utf-8"),
    (".js", "text/javascript; charset=utf-8"),
    (".mjs", "text/javascript; charset=utf-8"),
    (".css", "text/css; charset=utf-8"),
    (".txt", "text/plain; charset=utf-8"),
];

/// Files by path.
pub(super) struct Files(HashMap<String, Bytes>);

impl Files {
    /// Unpacks the files.
    pub(super) fn load() -> Result<Self, Error> {
        let unpacked = || Error::io("cannot unpack the files of the web console");
        let mut files = HashMap::new();
        for entry in tar::Archive::new(GzDecoder::new(PACKED)).entries().map_err(unpacked())? {
            let mut entry = entry.map_err(unpacked())?;
            let path = entry.path().map_err(unpacked())?.to_string_lossy().into_owned();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).map_err(unpacked())?;
            files.insert(path, Bytes::from(content));
        }
        files.insert("licences.txt".to_owned(), licences(&files).into());
        files.extend(PAGES.map(|(path, content)| (path.to_owned(), Bytes::from_static(content.as_bytes()))));
        Ok(Self(files))
    }

    /// Returns a file and its type.
    pub(super) fn get(&self, path: &str) -> Option<(Bytes, &'static str)> {
        let (_, type_) = TYPES.iter().find(|(end, _)| path.ends_with(end))?;
        Some((self.0.get(path)?.clone(), type_))
    }
}

/// Returns name, version, licence, integrity and source of each package.
fn packages() -> impl Iterator<Item = [&'static str; 5]> {
    PACKAGES.lines().skip(1).filter_map(|line| line.split('\t').take(5).collect::<Vec<_>>().try_into().ok())
}

/// Joins the notices of all packages.
fn licences(files: &HashMap<String, Bytes>) -> String {
    let mut text = "Packages that this web console contains, unmodified, with their licences and sources.\n".to_owned();
    for [package, version, licence, _, source] in packages() {
        text += &format!("\n{package} {version}\nlicence: {licence}\nsource: {source}\n");
        let folder = format!("{}/", package.rsplit('/').next().unwrap_or(package));
        let is_notice =
            |path: &str| path.starts_with(&folder) && (path.contains("LICENSE") || path.ends_with("AUTHORS"));
        let mut notices = files.iter().filter(|(path, _)| is_notice(path)).collect::<Vec<_>>();
        notices.sort();
        for (path, notice) in notices {
            text += &format!("\n---- {path} ----\n\n{}", String::from_utf8_lossy(notice));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use base64::{Engine, engine::general_purpose::STANDARD};
    use sha2::{Digest, Sha512};

    use super::*;

    #[test]
    fn packages_are_those_of_npm() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ui/packages");
        let mut found = 0;
        for [package, version, _, integrity, source] in packages() {
            let name = package.rsplit('/').next().unwrap();
            let archive = std::fs::read(folder.join(format!("{name}-{version}.tgz"))).unwrap();
            assert_eq!(format!("sha512-{}", STANDARD.encode(Sha512::digest(&archive))), integrity, "{package}");
            assert!(source.starts_with("https://") && source.ends_with(version), "{source}");
            found += 1;
        }
        assert_eq!(std::fs::read_dir(folder).unwrap().count(), found + 1, "files without a row in packages.tsv");
    }

    /// Returns the paths of modules and style sheets in a text.
    fn mentioned(text: &str) -> Vec<&str> {
        let words = text.split(['"', '\'']);
        words.filter(|word| [".js", ".mjs", ".css"].iter().any(|end| word.ends_with(end))).collect()
    }

    #[test]
    fn files_that_pages_load_are_there_and_none_is_of_another_server() {
        let files = Files::load().unwrap();
        for (page, content) in PAGES {
            assert!(!content.contains("://"), "{page} names another server");
            assert!(!content.contains("innerHTML") && !content.contains("style="), "{page}");
            for path in mentioned(content) {
                assert!(files.get(path.trim_start_matches("./")).is_some(), "{page}: {path}");
            }
        }
    }

    #[test]
    fn modules_of_packages_are_complete() {
        let files = Files::load().unwrap();
        let modules = files.0.iter().filter(|(path, _)| path.starts_with("novnc/") && path.ends_with(".js"));
        let mut found = 0;
        for (path, content) in modules {
            let text = std::str::from_utf8(content).unwrap();
            for line in text.lines().filter(|line| line.starts_with("import ") || line.starts_with("} from")) {
                let import = mentioned(line);
                let import = import.first().unwrap_or_else(|| panic!("{path}: {line}"));
                let mut folders = path.split('/').collect::<Vec<_>>();
                folders.pop();
                for part in import.split('/') {
                    match part {
                        "." => {}
                        ".." => drop(folders.pop()),
                        name => folders.push(name),
                    }
                }
                assert!(files.get(&folders.join("/")).is_some(), "{path}: {import}");
                found += 1;
            }
        }
        assert!(found > 50, "{found} imports");
    }

    #[test]
    fn files_have_types_and_notices_are_sent() {
        let files = Files::load().unwrap();
        for (path, expected) in [
            ("index.html", Some("text/html; charset=utf-8")),
            ("novnc/core/rfb.js", Some("text/javascript; charset=utf-8")),
            ("xterm/lib/xterm.mjs", Some("text/javascript; charset=utf-8")),
            ("xterm/css/xterm.css", Some("text/css; charset=utf-8")),
            ("novnc/package.json", None),
            ("../index.html", None),
            ("none.html", None),
        ] {
            assert_eq!(files.get(path).map(|(_, type_)| type_), expected, "{path}");
        }
        let (notices, _) = files.get("licences.txt").unwrap();
        let notices = std::str::from_utf8(&notices).unwrap();
        for text in [
            "Mozilla Public License",
            "The noVNC authors",
            "The xterm.js authors",
            "Vitaly Puzrin",
            "novnc/noVNC/tree/",
        ] {
            assert!(notices.contains(text), "{text}");
        }
    }
}
