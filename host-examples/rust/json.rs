//! `--json`: the figures of a command for programs. One shape for all commands; README.md beside this lists its keys.

use std::path::PathBuf;
use std::sync::atomic::Ordering;

use serde_json::{Value, json};

use crate::draft::Draft;
use crate::{Result, api, files, say};

/// The number of the shape. It changes when a key is removed or gets another meaning.
const SHAPE: u32 = 1;

#[derive(Debug, clap::Args)]
pub struct JsonOptions {
    /// Write the figures there as JSON; - is standard output, and the text goes to standard error then.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Where the figures of a command go.
pub enum Json {
    File(Draft),
    Output,
    Nowhere,
}

impl JsonOptions {
    /// What cannot be written is said before anything runs.
    pub fn open(&self) -> Result<Json> {
        match self.json.as_deref() {
            None => Ok(Json::Nowhere),
            Some(path) if files::is_stdio(path) => {
                say::TEXT_IS_ASIDE.store(true, Ordering::Relaxed);
                Ok(Json::Output)
            }
            Some(path) => Draft::new(path).map(Json::File),
        }
    }
}

impl Json {
    /// Writes what a command found: one object for each case.
    pub fn write(self, command: &str, results: Vec<Value>) -> Result<()> {
        let (version, _) = api::version()?;
        let shape = json!({ "json": SHAPE, "command": command, "version": version, "results": results });
        let text = format!("{shape:#}\n");
        match self {
            Json::File(draft) => draft.write(&text),
            Json::Output => say::output(&text),
            Json::Nowhere => Ok(()),
        }
    }

    /// The results of a file that this command wrote.
    pub fn read(bytes: &[u8], command: &str) -> Result<Vec<Value>> {
        let value: Value = serde_json::from_slice(bytes).map_err(|why| why.to_string())?;
        if let Some(other) = value["command"].as_str().filter(|other| *other != command) {
            return Err(format!("it is of `vvae {other}`; name another"));
        }
        value["results"].as_array().cloned().ok_or_else(|| "it has no list of results".into())
    }
}
