//! Debian packages in an image, from the control data that the image contains.

use std::path::Path;

use crate::{
    error::{Error, Result},
    oci,
};

/// Folder of the control data in an image, as scanners expect it.
const STATUS: &str = "var/lib/dpkg/status.d/";

/// A Debian package.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Package {
    pub name: String,
    pub version: String,
    pub architecture: String,
    /// Name and version of the source package, if they differ.
    pub source: Option<String>,
    pub maintainer: String,
}

/// Reads the packages of an image from its archive.
pub(super) fn packages(archive: &Path) -> Result<Vec<Package>> {
    let mut packages: Vec<Package> = oci::files(archive, STATUS)?
        .values()
        .map(|control| parse(&String::from_utf8_lossy(control)))
        .collect::<Result<_>>()?;
    packages.sort();
    if packages.is_empty() {
        return Err(Error::NotReleasable(format!("{} contains no control data of packages", archive.display())));
    }
    Ok(packages)
}

/// Parses the control data of one package.
pub(super) fn parse(control: &str) -> Result<Package> {
    let field = |name: &str| {
        control
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
            .map(|value| value.trim().to_owned())
            .filter(|value| !value.is_empty())
    };
    let needed = |name: &str| {
        field(name).ok_or_else(|| Error::NotReleasable(format!("control data of a package has no {name}:\n{control}")))
    };
    Ok(Package {
        name: needed("Package")?,
        version: needed("Version")?,
        architecture: needed("Architecture")?,
        source: field("Source"),
        maintainer: field("Maintainer").unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_data_is_parsed_and_incomplete_data_refused() {
        let package = parse(
            "Package: libc6\nSource: glibc (2.41-1)\nVersion: 2.41-12\nArchitecture: amd64\nDescription: x\n Version: 9\n",
        );
        let package = package.unwrap();
        assert_eq!((package.name.as_str(), package.version.as_str()), ("libc6", "2.41-12"));
        assert_eq!(package.source.as_deref(), Some("glibc (2.41-1)"));
        assert!(parse("Package: a\nArchitecture: all\n").unwrap_err().to_string().contains("Version"));
    }
}
