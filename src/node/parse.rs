//! Parses the text of a parameter. Nothing is guessed.

use super::{Param, ParamKind, Value};
use crate::error::{Error, Result};
use crate::ir::GivenRates;

const UNITS: [(&str, u64); 6] =
    [("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("KB", 1_000), ("MB", 1_000_000), ("GB", 1_000_000_000)];

pub(super) fn value(param: &Param, text: &str) -> Result<Value> {
    let refuse = |refused: &str| {
        let key = param.key();
        Error::Argument(format!("{key}: \"{refused}\" is not accepted; {key} takes {}", accepted(&param.kind)))
    };
    let parsed = match param.kind {
        ParamKind::Int { auto, min, max, .. } => match text {
            "auto" | "0" if auto => Some(Value::Auto),
            _ => digits(text).filter(|n| (min..=max).contains(n)).map(Value::Int),
        },
        ParamKind::Float { min, max, .. } => {
            // A NaN is in no range.
            text.parse::<f32>().ok().filter(|x| (min..=max).contains(&f64::from(*x))).map(Value::Float)
        }
        ParamKind::Bool => match text {
            "true" | "1" => Some(Value::Bool(true)),
            "false" | "0" => Some(Value::Bool(false)),
            _ => None,
        },
        ParamKind::Choice(choices) => choices.iter().position(|c| c.to_bytes() == text.as_bytes()).map(Value::Choice),
        ParamKind::Bytes { min, max, list, .. } => {
            let limit = |text: &str| match text {
                "auto" => Some(Value::Auto),
                _ if text.ends_with('%') => percent(text).map(Value::Percent),
                _ => bytes(text).filter(|n| (min..=max).contains(n)).map(Value::Int),
            };
            if list && text.contains(',') {
                text.split(',').map(limit).collect::<Option<_>>().map(Value::List)
            } else {
                limit(text)
            }
        }
        ParamKind::Path => Some(Value::Path(text.into())),
        ParamKind::Rates { min, max } => Some(match text {
            "auto" => Value::Auto,
            _ => Value::Rates(rates(text, min, max).map_err(refuse)?),
        }),
    };
    parsed.ok_or_else(|| refuse(text))
}

/// The values of a parameter, in words.
pub(super) fn accepted(kind: &ParamKind) -> String {
    match *kind {
        ParamKind::Int { auto: true, max, .. } => format!("auto (or 0), or a whole number from 1 to {max}"),
        ParamKind::Int { auto: false, min, max, .. } => format!("a whole number from {min} to {max}"),
        ParamKind::Float { min, max, .. } => format!("a number from {min} to {max}"),
        ParamKind::Bool => "true, false, 1 or 0".into(),
        ParamKind::Choice(choices) => {
            let words: Vec<_> = choices.iter().map(|c| super::ports::utf8(c)).collect();
            format!("one of {}", words.join(", "))
        }
        ParamKind::Bytes { min, list, .. } => {
            let units: Vec<_> = UNITS.iter().map(|(unit, _)| *unit).collect();
            let above = if min > 0 { " above 0" } else { "" };
            let list = if list { "; or a list of these, one for each device, such as 8GiB,auto" } else { "" };
            format!(
                "auto, a percentage of free memory such as 80%, or a number of bytes{above}, also in {}, such as 8GiB \
                 or 2.7GiB{list}",
                units.join(", ")
            )
        }
        ParamKind::Path => "a path, or nothing".into(),
        ParamKind::Rates { min, max } => format!(
            "auto, or any of products, memory and copies, each once and from {min:e} to {max:e}, such as \
             products=3.2e14,memory=3.6e12,copies=5e10"
        ),
    }
}

/// Decimal digits and nothing else: `str::parse` would take a plus sign.
fn digits(text: &str) -> Option<u64> {
    if text.bytes().all(|b| b.is_ascii_digit()) { text.parse().ok() } else { None }
}

fn percent(text: &str) -> Option<u64> {
    text.strip_suffix('%').and_then(digits).filter(|n| (1..=100).contains(n))
}

fn bytes(text: &str) -> Option<u64> {
    let (number, unit) =
        UNITS.iter().find_map(|(suffix, unit)| Some((text.strip_suffix(suffix)?, *unit))).unwrap_or((text, 1));
    let (whole, decimals) = number.split_once('.').unwrap_or((number, "0"));
    // A fraction of a byte means nothing, and more digits than these change no byte.
    if number.contains('.') && (unit == 1 || whole.is_empty() || decimals.is_empty() || decimals.len() > 9) {
        return None;
    }
    let scale = 10u128.pow(decimals.len() as u32);
    let number = u128::from(digits(whole)?) * scale + u128::from(digits(decimals)?);
    u64::try_from(number.checked_mul(u128::from(unit))? / scale).ok()
}

/// The error is the part that is wrong.
fn rates(text: &str, min: f64, max: f64) -> std::result::Result<GivenRates, &str> {
    let mut given = GivenRates::default();
    for part in text.split(',') {
        let (name, number) = part.split_once('=').ok_or(part)?;
        let rate = match name {
            "products" => &mut given.products,
            "memory" => &mut given.memory,
            "copies" => &mut given.copies,
            _ => return Err(part),
        };
        // A NaN is in no range.
        let number = number.parse().ok().filter(|x| (min..=max).contains(x)).ok_or(part)?;
        if rate.replace(number).is_some() {
            return Err(part);
        }
    }
    Ok(given)
}

#[cfg(test)]
mod tests {
    use super::super::PARAMS;
    use super::*;

    fn parse(key: &str, text: &str) -> Result<Value> {
        value(PARAMS.iter().find(|p| p.key() == key).unwrap(), text)
    }

    #[test]
    fn bytes_take_units() {
        for (text, bytes) in [
            ("1", 1),
            ("3KB", 3_000),
            ("3KiB", 3 << 10),
            ("8GiB", 8 << 30),
            ("2GB", 2_000_000_000),
            ("2.7GiB", 2_899_102_924),
            ("0.5KB", 500),
            ("1.000000001GB", 1_000_000_001),
        ] {
            assert_eq!(parse("memory_limit", text), Ok(Value::Int(bytes)), "{text}");
        }
        assert_eq!(parse("memory_limit", "18446744073709551615"), Ok(Value::Int(u64::MAX)));
        assert_eq!(parse("memory_limit", "auto"), Ok(Value::Auto));
        assert_eq!(parse("memory_limit", "80%"), Ok(Value::Percent(80)));
        assert_eq!(parse("host_memory_limit", "0"), Ok(Value::Int(0)));
        let list = Value::List(vec![Value::Int(8 << 30), Value::Auto, Value::Percent(5)]);
        assert_eq!(parse("memory_limit", "8GiB,auto,5%"), Ok(list));
        assert!(["1,", ",1", ",", "1,,2", "1, 2", "1,0"].iter().all(|text| parse("memory_limit", text).is_err()));
        assert!(parse("host_memory_limit", "1,1").is_err());
        assert!(["0%", "101%", "%", "-5%", "8.5%", "8 %"].iter().all(|text| parse("memory_limit", text).is_err()));
        for text in [
            "",
            "0",
            "GiB",
            "-1",
            "+1",
            "1 GiB",
            "1.5",
            ".5GiB",
            "1.GiB",
            "1.5.2GiB",
            "1.-5GiB",
            "0.0GiB",
            "8G",
            "17179869184GiB",
            "1e9",
            "0x10",
            " 1",
            "1\n",
        ] {
            let error = parse("memory_limit", text).unwrap_err().to_string();
            assert!(error.contains("memory_limit") && error.contains(&format!("\"{text}\"")), "{error}");
            assert!(error.contains("GiB"), "{error}");
        }
    }

    #[test]
    fn integers_are_digits_within_the_range() {
        assert_eq!(parse("threads", "auto"), Ok(Value::Auto));
        assert_eq!(parse("threads", "0"), Ok(Value::Auto));
        assert_eq!(parse("threads", "1024"), Ok(Value::Int(1024)));
        assert_eq!(parse("seed", "0"), Ok(Value::Int(0)));
        assert_eq!(parse("encode_tile_size", "65"), Ok(Value::Int(65)), "a step is for sliders");
        for (key, text) in [("threads", "1025"), ("encode_tile_size", "63"), ("seed", "18446744073709551616")] {
            let error = parse(key, text).unwrap_err().to_string();
            assert!(error.contains(text) && error.contains("from"), "{error}");
        }
        assert!(parse("threads", "00").is_err());
        for text in ["", "-1", "+1", "1.0", "auto", "4 ", "\u{661}"] {
            assert!(parse("seed", text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn floats_are_finite_and_within_the_range() {
        assert_eq!(parse("scaling_factor", "0.75"), Ok(Value::Float(0.75)));
        assert_eq!(parse("scaling_factor", "2e-3"), Ok(Value::Float(0.002)));
        for text in ["", "nan", "NaN", "inf", "-inf", "1e40", "0", "-1", "1e-50", "0,9", " 1", "1.0f"] {
            assert!(parse("scaling_factor", text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn rates_are_named_numbers() {
        let given = |products, memory, copies| Ok(Value::Rates(GivenRates { products, memory, copies }));
        assert_eq!(parse("rates", "auto"), Ok(Value::Auto));
        assert_eq!(parse("rates", "memory=3.6e12"), given(None, Some(3.6e12), None));
        assert_eq!(parse("rates", "copies=50000000000,products=1e18"), given(Some(1e18), None, Some(5e10)));
        for (text, refused) in [
            ("", ""),
            ("products", "products"),
            ("products=", "products="),
            ("products=1e9,", ""),
            ("products=1e9, memory=1e9", " memory=1e9"),
            ("products=1e9,speed=1e9", "speed=1e9"),
            ("copies=1e9,copies=1e9", "copies=1e9"),
            ("memory=nan", "memory=nan"),
            ("memory=inf", "memory=inf"),
            ("memory=-1e9", "memory=-1e9"),
            ("memory=0", "memory=0"),
            ("memory=9e5", "memory=9e5"),
            ("memory=1.1e18", "memory=1.1e18"),
            ("copies=5GB", "copies=5GB"),
        ] {
            let error = parse("rates", text).unwrap_err().to_string();
            assert!(error.contains(&format!("rates: \"{refused}\" is not")) && error.contains("from 1e6"), "{error}");
        }
    }

    #[test]
    fn choices_and_switches_are_words() {
        assert_eq!(parse("posterior", "sample"), Ok(Value::Choice(1)));
        assert_eq!(parse("encode_tiled", "1"), Ok(Value::Bool(true)));
        assert_eq!(parse("encode_tiled", "false"), Ok(Value::Bool(false)));
        let error = parse("posterior", "Sample").unwrap_err().to_string();
        assert!(error.contains("one of mean, sample"), "{error}");
        let error = parse("encode_tiled", "yes").unwrap_err().to_string();
        assert!(error.contains("true, false, 1 or 0"), "{error}");
    }
}
