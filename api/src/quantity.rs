//! Kubernetes quantities as numbers.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use thiserror::Error;

/// Reasons why a quantity is invalid.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
pub enum QuantityError {
    /// The text is not a number with a known suffix.
    #[error("{0:?} is not a quantity")]
    Malformed(String),
    /// The number is out of range.
    #[error("{0:?} is out of range")]
    OutOfRange(String),
}

/// Binary suffixes and their power of two.
const BINARY: [(&str, u32); 6] = [("Ki", 10), ("Mi", 20), ("Gi", 30), ("Ti", 40), ("Pi", 50), ("Ei", 60)];

/// Decimal suffixes and their power of ten.
const DECIMAL: [(&str, i32); 9] =
    [("n", -9), ("u", -6), ("m", -3), ("k", 3), ("M", 6), ("G", 9), ("T", 12), ("P", 15), ("E", 18)];

/// Limits digits of a number, which bounds the parsing time.
const MAX_DIGITS: usize = 64;

/// Returns the quantity in thousandths, rounded up, as the scheduler counts CPU.
pub fn milli(quantity: &Quantity) -> Result<i64, QuantityError> {
    parse(&quantity.0, 3)
}

/// Returns the quantity in whole units, such as bytes or CPUs, rounded up.
pub fn units(quantity: &Quantity) -> Result<i64, QuantityError> {
    parse(&quantity.0, 0)
}

/// Returns true for a whole number of thousandths, and for a number that is too large to determine this.
pub fn has_whole_milli(quantity: &Quantity) -> bool {
    match (parse(&quantity.0, 3), parse(&quantity.0, 9)) {
        (Ok(milli), Ok(nano)) => milli.checked_mul(1_000_000) == Some(nano),
        _ => true,
    }
}

/// Returns a number of bytes as a quantity with the largest binary suffix that divides it.
pub fn bytes(bytes: i64) -> Quantity {
    for (suffix, power) in BINARY.iter().rev() {
        let unit = 1_i64 << power;
        if bytes != 0 && bytes % unit == 0 {
            return Quantity(format!("{}{suffix}", bytes / unit));
        }
    }
    Quantity(bytes.to_string())
}

/// Returns the quantity in Kubernetes' canonical form, with the largest suffix that gives a whole number: `2Gi` for `2048Mi`,
/// `500m` for `0.5`, `1M` for `1000000`. Returns quantities with an exponent and invalid ones unchanged.
pub fn canonical(quantity: &Quantity) -> String {
    let text = &quantity.0;
    let suffix = text.trim_start_matches(|c: char| c.is_ascii_digit() || "+-.".contains(c));
    let has_exponent = suffix.starts_with(['e', 'E']) && !["E", "Ei"].contains(&suffix);
    let Ok(whole) = units(quantity) else { return text.clone() };
    if has_exponent {
        return text.clone();
    }
    let is_whole = milli(quantity).map_or(true, |milli| whole.checked_mul(1000) == Some(milli));
    if !is_whole {
        let nano = parse(text, 9);
        for (shift, suffix, factor) in [(3, "m", 1_000_000), (6, "u", 1000), (9, "n", 1)] {
            let Ok(value) = parse(text, shift) else { break };
            if nano.as_ref().map_or(true, |nano| value.checked_mul(factor) == Some(*nano)) {
                return format!("{value}{suffix}");
            }
        }
        return text.clone();
    }
    if suffix.ends_with('i') {
        return bytes(whole).0;
    }
    let (mut value, mut suffix) = (whole, "");
    for larger in ["k", "M", "G", "T", "P", "E"] {
        if value == 0 || value % 1000 != 0 {
            break;
        }
        (value, suffix) = (value / 1000, larger);
    }
    format!("{value}{suffix}")
}

/// Returns the amounts of memory that a text may stand for which is none, such as `128M or 128Mi` for `128MB`, `128m` and
/// `128`. `None` if the text is not a number with a unit of bytes.
#[must_use]
pub fn suggested(text: &str) -> Option<String> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) =
        text.split_at_checked(end).filter(|(number, _)| number.starts_with(|c: char| c.is_ascii_digit()))?;
    let unit = unit.trim().to_ascii_lowercase();
    let letter = match unit.strip_suffix("ytes").or(Some(&*unit)).map(|unit| unit.trim_end_matches(['b', 'i']))? {
        "" => "M",
        "k" => "k",
        "m" => "M",
        "g" => "G",
        "t" => "T",
        "p" => "P",
        "e" => "E",
        _ => return None,
    };
    Some(format!("{number}{letter} or {number}{}i", letter.to_ascii_uppercase()))
}

/// Returns thousandths as a quantity, such as `100m` or `2`.
pub fn from_milli(milli: i64) -> Quantity {
    if milli % 1000 == 0 { Quantity((milli / 1000).to_string()) } else { Quantity(format!("{milli}m")) }
}

/// Parses `text` as a multiple of `10^-shift`, rounded away from zero.
fn parse(text: &str, shift: i32) -> Result<i64, QuantityError> {
    let malformed = || QuantityError::Malformed(text.chars().take(MAX_DIGITS).collect());
    let out_of_range = || QuantityError::OutOfRange(text.chars().take(MAX_DIGITS).collect());

    let (negative, rest) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
    let (number, suffix) = rest.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
        return Err(malformed());
    }
    if whole.len() + fraction.len() > MAX_DIGITS {
        return Err(out_of_range());
    }

    let (binary, decimal) = if suffix.is_empty() {
        (0, 0)
    } else if let Some((_, power)) = BINARY.iter().find(|(name, _)| *name == suffix) {
        (*power, 0)
    } else if let Some((_, power)) = DECIMAL.iter().find(|(name, _)| *name == suffix) {
        (0, *power)
    } else {
        let exponent = suffix.strip_prefix(['e', 'E']).ok_or_else(malformed)?;
        (0, exponent.parse::<i32>().ok().filter(|e| e.unsigned_abs() <= 64).ok_or_else(malformed)?)
    };

    // value = digits × 2^binary × 10^(decimal + shift - fraction digits)
    let digits: String = [whole, fraction].concat();
    let digits = digits.trim_start_matches('0');
    if digits.is_empty() {
        return Ok(0);
    }
    let mut value: u128 = digits.parse().map_err(|_| out_of_range())?;
    value = value.checked_mul(1_u128 << binary).ok_or_else(out_of_range)?;
    let exponent = decimal + shift - i32::try_from(fraction.len()).map_err(|_| out_of_range())?;
    value = match u32::try_from(exponent) {
        Ok(up) => 10_u128.checked_pow(up).and_then(|factor| value.checked_mul(factor)).ok_or_else(out_of_range)?,
        Err(_) => match 10_u128.checked_pow(exponent.unsigned_abs()) {
            Some(divisor) => value.div_ceil(divisor),
            None => 1,
        },
    };
    let value = i64::try_from(value).map_err(|_| out_of_range())?;
    Ok(if negative { -value } else { value })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn q(text: &str) -> Quantity {
        Quantity(text.to_owned())
    }

    #[test]
    fn quantities_read_as_units() {
        for (text, want) in [
            ("0", 0),
            ("128", 128),
            ("128Mi", 128 << 20),
            ("1.5Gi", 1_610_612_736),
            ("1e3", 1000),
            ("1E", 1_000_000_000_000_000_000),
            ("2k", 2000),
            ("100m", 1),
            (".5", 1),
            ("-1Ki", -1024),
        ] {
            assert_eq!(units(&q(text)), Ok(want), "{text}");
        }
    }

    #[test]
    fn quantities_read_as_thousandths() {
        for (text, want) in [("100m", 100), ("1", 1000), ("1.5", 1500), ("1n", 1), ("0.0001", 1)] {
            assert_eq!(milli(&q(text)), Ok(want), "{text}");
        }
    }

    #[test]
    fn quantities_are_written_as_kubernetes_does() {
        for (text, want) in [
            ("0", "0"),
            ("2048Mi", "2Gi"),
            ("1.5Gi", "1536Mi"),
            ("0.5Ki", "512"),
            ("-64Mi", "-64Mi"),
            ("1000000", "1M"),
            ("999999", "999999"),
            ("0.5", "500m"),
            ("1500m", "1500m"),
            ("1000m", "1"),
            ("0.0001", "100u"),
            ("1e3", "1e3"),
            ("2E", "2E"),
            ("much", "much"),
        ] {
            assert_eq!(canonical(&q(text)), want, "{text}");
        }
    }

    #[test]
    fn invalid_text_is_rejected() {
        for text in ["", "Mi", "1.2.3", "1Xi", "abc", "1e", "--1", "1 Gi", "."] {
            assert!(units(&q(text)).is_err(), "{text:?}");
        }
        assert!(units(&q("100E")).is_err());
        assert!(units(&q(&"9".repeat(1000))).is_err());
    }

    #[test]
    fn bytes_take_the_largest_exact_suffix() {
        assert_eq!(bytes(128 << 20), q("128Mi"));
        assert_eq!(bytes(1000), q("1000"));
        assert_eq!(bytes(0), q("0"));
        assert_eq!(from_milli(1500), q("1500m"));
        assert_eq!(from_milli(2000), q("2"));
    }

    #[test]
    fn amounts_with_a_wrong_unit_have_suggestions() {
        for (text, expected) in [
            ("128MB", Some("128M or 128Mi")),
            ("128m", Some("128M or 128Mi")),
            ("128", Some("128M or 128Mi")),
            ("1.5 GiB", Some("1.5G or 1.5Gi")),
            ("2g", Some("2G or 2Gi")),
            ("512KB", Some("512k or 512Ki")),
            ("64 bytes", Some("64M or 64Mi")),
            ("3 apples", None),
            ("much", None),
            ("-1M", None),
            ("", None),
        ] {
            assert_eq!(suggested(text).as_deref(), expected, "{text}");
        }
    }
}
