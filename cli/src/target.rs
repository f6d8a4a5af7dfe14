//! VMs and VMIs as arguments: `vmi/NAME`, `vm/NAME`, `vm/NAME/NAMESPACE`, or `NAME` for a VMI.

use clap::ValueEnum;

use crate::error::Error;

/// Kind of an object that runs a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    /// A VirtualMachine
    #[value(alias = "vms", alias = "virtualmachine", alias = "virtualmachines")]
    Vm,
    /// A VirtualMachineInstance
    #[value(alias = "vmis", alias = "virtualmachineinstance", alias = "virtualmachineinstances")]
    Vmi,
}

/// A VM or VMI named by the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// Kind in the argument.
    pub kind: Kind,
    /// Its name.
    pub name: String,
    /// Its namespace, if the argument contains one.
    pub namespace: Option<String>,
}

impl Target {
    /// Parses an argument.
    pub(crate) fn parse(argument: &str) -> Result<Self, Error> {
        let parts = argument.split('/').collect::<Vec<_>>();
        let (kind, name, namespace) = match parts.as_slice() {
            [name] => ("vmi", *name, None),
            [kind, name] => (*kind, *name, None),
            [kind, name, namespace] => (*kind, *name, Some(*namespace)),
            _ => return Err(Error::Usage(format!("{argument:?} is not of the form TYPE/NAME[/NAMESPACE]"))),
        };
        let kind = Kind::from_str(kind, true)
            .map_err(|_| Error::Usage(format!("unknown resource type {kind:?}: use vm/NAME or vmi/NAME")))?;
        let namespace = match namespace {
            None => None,
            Some(text) if is_label(text) => Some(text.to_owned()),
            Some(text) => return Err(Error::Usage(format!("{text:?} is not a valid namespace"))),
        };
        Ok(Self { kind, name: object_name(name)?.to_owned(), namespace })
    }

    /// Returns the plural resource name.
    pub(crate) fn resource(&self) -> &'static str {
        match self.kind {
            Kind::Vm => "virtualmachines",
            Kind::Vmi => "virtualmachineinstances",
        }
    }

    /// Returns the short name of the kind.
    pub(crate) fn word(&self) -> &'static str {
        match self.kind {
            Kind::Vm => "vm",
            Kind::Vmi => "vmi",
        }
    }
}

/// Returns true if the text is a valid name of a namespace.
pub(crate) fn is_label(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= 63
        && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}

/// Parses `NAME`, `vmi/NAME` or `vm/NAME` and returns the name.
pub(crate) fn object_name(argument: &str) -> Result<&str, Error> {
    let name = match argument.split_once('/') {
        None => argument,
        Some((kind, name)) if Kind::from_str(kind, true).is_ok() => name,
        Some((kind, _)) => {
            return Err(Error::Usage(format!("unknown resource type {kind:?}: use vm/NAME or vmi/NAME")));
        }
    };
    // The name becomes part of a URL path.
    let valid = !name.is_empty()
        && name.len() <= 253
        && name.split('.').all(|part| !part.is_empty())
        && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.');
    if valid { Ok(name) } else { Err(Error::Usage(format!("{name:?} is not a valid name of a VM or VMI"))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_taken_in_all_their_forms() {
        let target = |kind, name: &str, namespace: Option<&str>| Target {
            kind,
            name: name.into(),
            namespace: namespace.map(str::to_owned),
        };
        for (argument, expected) in [
            ("a", target(Kind::Vmi, "a", None)),
            ("vmi/a", target(Kind::Vmi, "a", None)),
            ("VirtualMachine/a", target(Kind::Vm, "a", None)),
            ("vm/a/ns", target(Kind::Vm, "a", Some("ns"))),
        ] {
            assert_eq!(Target::parse(argument).unwrap(), expected, "{argument}");
        }
        for argument in ["", "pod/a", "vm/", "vm/a/", "vm/a/b/c", "vm/a/..", "vm/a b"] {
            assert!(Target::parse(argument).is_err(), "{argument}");
        }
    }

    #[test]
    fn object_names_are_taken_with_and_without_kind() {
        for (argument, expected) in [("a", Some("a")), ("vmi/a.b-1", Some("a.b-1")), ("vm/a", Some("a"))] {
            assert_eq!(object_name(argument).ok(), expected);
        }
        for argument in ["", "pod/a", "vm/", "a/../b", "..", "vm/..", ".a", "A", "a?b=c", "a b"] {
            assert!(object_name(argument).is_err(), "{argument}");
        }
    }
}
