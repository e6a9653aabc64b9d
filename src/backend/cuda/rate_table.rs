//! The table of measured rates: a small JSON file that processes share. What is damaged, of another format, or of
//! another card, CUDA version or kernel is not found. A file that is no table is never replaced. Calls no driver.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::file::{Replacement, cannot_write, open_regular};
use crate::ir::{PairCosts, Rates};

/// The key that names the file, for errors.
const KEY: &str = "autotune_path";
/// Of the file. Raised when what is measured changes, too.
const FORMAT: u64 = 1;
/// The newest are kept.
const MOST_ENTRIES: usize = 64;
/// Anything longer is no table.
const MOST_BYTES: u64 = 1 << 20;
/// What the key `rates` takes, so that the text of a plan can be given back.
pub const RATES: std::ops::RangeInclusive<f64> = 1e6..=1e18;
pub const COSTS: std::ops::RangeInclusive<f64> = 0.25..=8.0;

/// What is measured of a card.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MeasuredRates {
    pub rates: Rates,
    pub pairs: Option<PairCosts>,
}

/// Beside the driver's cache of compiled kernels; `None` if the environment does not say where that is.
pub fn default_path() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value: &OsString| !value.is_empty()).map(PathBuf::from);
    let (home, folder) = if cfg!(windows) { ("APPDATA", "NVIDIA") } else { ("HOME", ".nv") };
    let usual = || Some(set(home)?.join(folder));
    Some(set("CUDA_CACHE_PATH").or_else(usual)?.join("video-vae").join("rates.json"))
}

/// The rates of `card`, if they are there. `copy_contention` is not in the table.
pub fn read(path: &Path, card: &str, copy_contention: f64) -> Option<MeasuredRates> {
    let entry = table(path).map(entries)?.into_iter().find(|entry| entry["card"] == card)?;
    let number = |value: &Value, range: &std::ops::RangeInclusive<f64>| value.as_f64().filter(|x| range.contains(x));
    let rate = |name: &str| number(&entry[name], &RATES);
    let pairs = match &entry["pairs"] {
        Value::Null => None,
        costs => {
            Some(PairCosts { together: number(&costs["together"], &COSTS)?, alone: number(&costs["alone"], &COSTS)? })
        }
    };
    let (products, memory, copies) = (rate("products")?, rate("memory")?, rate("copies")?);
    Some(MeasuredRates { rates: Rates { products, memory, copies, copy_contention }, pairs })
}

/// Adds the rates of `card`, in place of older ones. Of two processes that write at once, one may lose its entry. Fails
/// if something else than a table is there.
pub fn store(path: &Path, card: &str, measured: &MeasuredRates) -> Result<()> {
    let MeasuredRates { rates, pairs } = measured;
    let pairs = pairs.map(|costs| json!({ "together": costs.together, "alone": costs.alone }));
    let new = json!({ "card": card, "products": rates.products, "memory": rates.memory, "copies": rates.copies,
        "pairs": pairs });
    // Cards of a process are often measured at the same time.
    static WRITING: Mutex<()> = Mutex::new(());
    let _writing = WRITING.lock();
    let no_table = || Error::Checkpoint(format!("{KEY}: {} exists and is no table", path.display()));
    let others = entries(table(path).ok_or_else(no_table)?).into_iter().filter(|entry| entry["card"] != card);
    let all: Vec<Value> = std::iter::once(new).chain(others).take(MOST_ENTRIES).collect();
    let fail = |why| cannot_write(KEY, path, &why);
    path.parent().map_or(Ok(()), std::fs::create_dir_all).map_err(fail)?;
    let mut file = Replacement::new(KEY, path)?;
    writeln!(file, "{:#}", json!({ "format": FORMAT, "rates": all })).map_err(fail)?;
    file.commit()
}

/// What is at a path: null if that is nothing, or an empty file; `None` if it is no table of any format.
fn table(path: &Path) -> Option<Value> {
    let file = match open_regular(path) {
        Ok((Some(file), _)) => file,
        // What is no file cannot be replaced.
        Ok((None, _)) => return Some(Value::Null),
        Err(_) => return (!path.is_file()).then_some(Value::Null),
    };
    let mut text = String::new();
    file.take(MOST_BYTES).read_to_string(&mut text).ok()?;
    if text.is_empty() {
        return Some(Value::Null);
    }
    serde_json::from_str(&text).ok().filter(|table: &Value| table["format"].is_number())
}

/// All entries of this format, newest first.
fn entries(mut table: Value) -> Vec<Value> {
    if table["format"] != FORMAT {
        return Vec::new();
    }
    if let Value::Array(entries) = table["rates"].take() { entries } else { Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTENTION: f64 = 0.06;

    fn measured(products: f64) -> MeasuredRates {
        let rates = Rates { products, memory: 3.612e12, copies: 4.623e10, copy_contention: CONTENTION };
        MeasuredRates { rates, pairs: Some(PairCosts { together: 1.137, alone: 1.95 }) }
    }

    fn count(path: &Path) -> usize {
        table(path).map_or(0, |table| entries(table).len())
    }

    /// A file in a folder of its own, which is removed at the end.
    struct TableFile(PathBuf);

    impl TableFile {
        fn new(name: &str) -> TableFile {
            let folder = std::env::temp_dir().join(format!("vvae-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&folder);
            TableFile(folder.join("new").join("rates.json"))
        }

        fn folder(&self) -> &Path {
            self.0.parent().and_then(Path::parent).unwrap()
        }
    }

    impl Drop for TableFile {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(self.folder());
        }
    }

    #[test]
    fn rates_are_read_as_they_were_stored() {
        let file = TableFile::new("round-trip");
        assert_eq!(read(&file.0, "a", CONTENTION), None);
        let without_pairs = MeasuredRates { pairs: None, ..measured(2.5e13) };
        store(&file.0, "a", &measured(3.207e14)).unwrap();
        store(&file.0, "b", &without_pairs).unwrap();
        assert_eq!(read(&file.0, "a", CONTENTION), Some(measured(3.207e14)));
        assert_eq!(read(&file.0, "b", CONTENTION), Some(without_pairs));
        assert_eq!(read(&file.0, "a, another driver", CONTENTION), None);
        store(&file.0, "a", &measured(1e14)).unwrap();
        assert_eq!(read(&file.0, "a", CONTENTION), Some(measured(1e14)));
        assert_eq!(count(&file.0), 2);
        (0..2 * MOST_ENTRIES).for_each(|i| store(&file.0, &i.to_string(), &measured(1e14)).unwrap());
        assert_eq!(count(&file.0), MOST_ENTRIES);
        assert_eq!(read(&file.0, "a", CONTENTION), None, "the oldest go first");
    }

    #[test]
    fn damaged_tables_are_ignored_and_stale_ones_replaced() {
        let file = TableFile::new("damaged");
        store(&file.0, "a", &measured(3.2e14)).unwrap();
        let whole = std::fs::read_to_string(&file.0).unwrap();
        for (from, to) in [
            ("\"format\": 1", "\"format\": 2"),
            ("\"products\": 320000000000000.0", "\"products\": 0"),
            ("\"products\": 320000000000000.0", "\"products\": \"fast\""),
            ("\"memory\"", "\"memories\""),
            ("\"alone\": 1.95", "\"alone\": 1e9"),
            ("\"rates\": [", "\"rates\": [[], 3, null, {}], \"other\": ["),
        ] {
            assert!(whole.contains(from), "{whole}");
            std::fs::write(&file.0, whole.replace(from, to)).unwrap();
            assert_eq!(read(&file.0, "a", CONTENTION), None, "{to}");
            store(&file.0, "a", &measured(3.2e14)).unwrap();
            assert_eq!(read(&file.0, "a", CONTENTION), Some(measured(3.2e14)), "{to}");
        }
        let cut = (1..whole.trim_end().len()).map(|end| whole.as_bytes()[..end].to_vec());
        let others = [&b"notes"[..], b"{}", b"[1]", b"{\"format\": \"pt\"}", &[0xff; 64]].map(<[u8]>::to_vec);
        for bytes in cut.chain(others).chain([vec![b'['; 4 << 20]]) {
            std::fs::write(&file.0, &bytes).unwrap();
            assert_eq!(read(&file.0, "a", CONTENTION), None, "{}", String::from_utf8_lossy(&bytes));
            let error = store(&file.0, "a", &measured(3.2e14)).unwrap_err().to_string();
            assert!(error.starts_with("autotune_path: ") && error.ends_with(" exists and is no table"), "{error}");
            assert_eq!(std::fs::read(&file.0).unwrap(), bytes, "it is left as it is");
        }
        std::fs::write(&file.0, b"").unwrap();
        store(&file.0, "a", &measured(3.2e14)).unwrap();
        assert_eq!(read(&file.0, "a", CONTENTION), Some(measured(3.2e14)));
    }

    #[test]
    fn what_cannot_be_a_table_is_an_error_that_names_the_key() {
        let file = TableFile::new("unwritable");
        std::fs::create_dir_all(&file.0).unwrap();
        // A folder in place of the file, and a file in place of a folder.
        std::fs::write(file.0.join("file"), b"").unwrap();
        for path in [file.0.clone(), file.0.join("file").join("rates.json")] {
            assert_eq!(read(&path, "a", CONTENTION), None);
            let error = store(&path, "a", &measured(1e14)).unwrap_err().to_string();
            assert!(error.starts_with("autotune_path: ") && error.contains("cannot be written"), "{error}");
        }
    }

    #[test]
    fn writers_at_once_leave_a_whole_table() {
        let file = TableFile::new("writers");
        std::thread::scope(|scope| {
            for writer in 0..4 {
                let path = &file.0;
                scope.spawn(move || {
                    for i in 0..20 {
                        store(path, &format!("{writer} {i}"), &measured(1e14)).unwrap();
                        assert!(count(path) > 0, "no reader sees a part of a table");
                    }
                });
            }
        });
        assert!(count(&file.0) > 0);
        assert_eq!(std::fs::read_dir(file.0.parent().unwrap()).unwrap().count(), 1, "no temporary file is left");
    }
}
