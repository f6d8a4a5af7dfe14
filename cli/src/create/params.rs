//! Values of flags with several parameters: `src:my-image,bootorder:1`.

use std::{collections::BTreeMap, fmt};

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::Error;

/// Texts of Kubernetes' checks, which virtctl repeats.
const QUANTITY: &str = "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'";
const LABEL: &str = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start \
                     and end with an alphanumeric character";

/// Returns the error for the value of a flag.
pub(super) fn invalid(flag: &str, why: impl fmt::Display) -> Error {
    Error::Usage(format!("failed to parse \"--{flag}\" flag: {why}"))
}

/// Returns the canonical form of a quantity.
pub(super) fn quantity(text: &str) -> Result<String, &'static str> {
    let quantity = Quantity(text.to_owned());
    api::quantity::milli(&quantity).or_else(|_| api::quantity::units(&quantity)).map_err(|_| QUANTITY)?;
    Ok(api::quantity::canonical(&quantity))
}

/// Splits `PREFIX/NAME` or `NAME`.
pub(super) fn split_prefix(text: &str) -> Result<(&str, &str), String> {
    let (prefix, name) = text.split_once('/').unwrap_or(("", text));
    match name.matches('/').count() {
        0 if name.is_empty() => Err("name cannot be empty".to_owned()),
        0 => Ok((prefix, name)),
        more => Err(format!("invalid count {} of slashes in prefix/name", more + 1)),
    }
}

/// Rejects names that no volume can have.
pub(super) fn check_label(flag: &str, name: &str) -> Result<(), Error> {
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    if name.len() > 63 {
        return Err(invalid(flag, format_args!("invalid name \"{name}\": must be no more than 63 characters")));
    }
    match name.bytes().all(is_inner) && !name.is_empty() && !name.starts_with('-') && !name.ends_with('-') {
        true => Ok(()),
        false => Err(invalid(flag, format_args!("invalid name \"{name}\": {LABEL}"))),
    }
}

/// The parameters in the value of a flag.
#[derive(Debug)]
pub(super) struct Params {
    flag: &'static str,
    values: BTreeMap<String, String>,
}

impl Params {
    /// Splits a value into parameters.
    pub(super) fn split(flag: &'static str, text: &str) -> Result<Self, Error> {
        if text.is_empty() {
            return Err(invalid(flag, "params may not be empty"));
        }
        let pair = |param: &str| match param.split_once(':') {
            Some((name, value)) => Ok((name.to_owned(), value.to_owned())),
            None => Err(invalid(flag, format_args!("params need to have at least one colon: {param}"))),
        };
        Ok(Self { flag, values: text.split(',').map(pair).collect::<Result<_, _>>()? })
    }

    /// Splits a value and rejects parameters that are not known.
    pub(super) fn parse(flag: &'static str, text: &str, known: &[&str]) -> Result<Self, Error> {
        let params = Self::split(flag, text)?;
        params.check(known)?;
        Ok(params)
    }

    /// Rejects unknown parameters, and numbers and sizes that are none.
    pub(super) fn check(&self, known: &[&str]) -> Result<(), Error> {
        let bad = |name: &str, why: &dyn fmt::Display| {
            Err(invalid(self.flag, format_args!("failed to parse param \"{name}\": {why}")))
        };
        if let Some(size) = self.values.get("size").filter(|_| known.contains(&"size"))
            && let Err(why) = quantity(size)
        {
            return bad("size", &why);
        }
        if let Some(order) = self.values.get("bootorder").filter(|_| known.contains(&"bootorder"))
            && let Err(why) = order.parse::<u32>()
        {
            return bad("bootorder", &why);
        }
        let unknown = self.values.iter().filter(|(name, _)| !known.contains(&name.as_str()));
        let unknown = unknown.map(|(name, value)| format!("{name}:{value}")).collect::<Vec<_>>();
        match unknown.is_empty() {
            true => Ok(()),
            false => Err(invalid(self.flag, format_args!("unknown param(s): {}", unknown.join(",")))),
        }
    }

    /// Returns a parameter, empty if it is absent.
    pub(super) fn get(&self, name: &str) -> &str {
        self.values.get(name).map(String::as_str).unwrap_or_default()
    }

    /// Returns a parameter that must be there.
    pub(super) fn required(&self, name: &str) -> Result<&str, Error> {
        match self.get(name) {
            "" => Err(invalid(self.flag, format_args!("{name} must be specified"))),
            value => Ok(value),
        }
    }

    /// Returns the parameter `src` as prefix and name.
    pub(super) fn source(&self) -> Result<(&str, &str), Error> {
        split_prefix(self.required("src")?).map_err(|why| invalid(self.flag, format_args!("src invalid: {why}")))
    }

    /// Returns the parameter `src`, which must be a name without namespace.
    pub(super) fn local_source(&self, kind: &str) -> Result<&str, Error> {
        match self.source()? {
            ("", name) => Ok(name),
            (_, name) => Err(invalid(self.flag, format_args!("not allowed to specify namespace of {kind} \"{name}\""))),
        }
    }

    /// Returns the boot order.
    pub(super) fn boot_order(&self) -> Option<u32> {
        self.get("bootorder").parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_pairs_with_colons() {
        let known = ["src", "size", "bootorder"];
        for (text, expected) in [
            ("src:my.registry:5000/a:b", Ok(("my.registry:5000/a:b", None))),
            ("src:a,bootorder:2", Ok(("a", Some(2)))),
            ("bootorder:1", Ok(("", Some(1)))),
            ("", Err("params may not be empty")),
            ("src", Err("params need to have at least one colon: src")),
            ("src:a,more:b", Err("unknown param(s): more:b")),
            ("src:a,size:big", Err("failed to parse param \"size\": quantities must match")),
            ("src:a,bootorder:x", Err("failed to parse param \"bootorder\": ")),
        ] {
            let params = Params::parse("f", text, &known);
            match expected {
                Ok(expected) => {
                    let params = params.unwrap();
                    assert_eq!((params.get("src"), params.boot_order()), expected, "{text}");
                }
                Err(expected) => {
                    let error = params.unwrap_err().to_string();
                    assert!(error.starts_with(&format!("failed to parse \"--f\" flag: {expected}")), "{error}");
                }
            }
        }
    }

    #[test]
    fn prefixes_names_and_quantities_are_parsed() {
        for (text, expected) in [
            ("a", Ok(("", "a"))),
            ("ns/a", Ok(("ns", "a"))),
            ("ns/", Err("name cannot be empty")),
            ("a/b/c", Err("invalid count 2 of slashes in prefix/name")),
        ] {
            assert_eq!(split_prefix(text), expected.map_err(str::to_owned), "{text}");
        }
        for (text, expected) in [("1024Mi", Some("1Gi")), ("0.5Gi", Some("512Mi")), ("5G", Some("5G")), ("x", None)] {
            assert_eq!(quantity(text).ok().as_deref(), expected, "{text}");
        }
        for (name, valid) in [("a-1", true), ("", false), ("-a", false), ("A", false), (&*"a".repeat(64), false)] {
            assert_eq!(check_label("f", name).is_ok(), valid, "{name}");
        }
    }
}
