//! The key `autotune`: rates are measured once, stored, and read by later handles and processes. On a simulated driver,
//! which computes nothing: what is measured there is wrong, and what becomes of it is right.

#![cfg(all(target_os = "linux", target_env = "gnu", feature = "cuda"))]

mod common;

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use common::safetensors::Folder;
use common::{Buffer, Vae, create_info, root, small};
use video_vae::capi::*;

const LATENT: [i64; 5] = [1, 16, 3, 10, 11];
const VIDEO: [i64; 5] = [1, 3, 9, 80, 88];
/// For the child: what it sets.
const SETTINGS: &str = "VVAE_TEST_AUTOTUNE";

type Log = Mutex<Vec<(i32, String)>>;

unsafe extern "C" fn keep(log: *mut c_void, level: i32, message: *const c_char) {
    // SAFETY: the log outlives its handle, and a message is a text.
    let (log, message) = unsafe { (&*log.cast::<Log>(), CStr::from_ptr(message)) };
    log.lock().unwrap().push((level, message.to_str().unwrap().to_owned()));
}

/// A process on the simulated driver: two handles, one after the other, each with a plan and a run.
#[test]
#[ignore = "a child of the other tests"]
fn child() {
    let Ok(settings) = std::env::var(SETTINGS) else { return };
    let weights = CString::new(small().to_str().unwrap()).unwrap();
    for handle in 0..2 {
        let log = Log::default();
        let log_user = std::ptr::from_ref(&log).cast_mut().cast();
        let device = c"cuda:0".as_ptr();
        let info = vvae_create_info { device, log: Some(keep), log_user, ..create_info(&weights) };
        let vae = Vae::create(&info).unwrap();
        for (key, value) in settings.split_whitespace().filter_map(|setting| setting.split_once('=')) {
            vae.configure(key, value).unwrap();
        }
        println!("\n{handle} {}", vae.plan("decode", LATENT).unwrap().1.lines().last().unwrap());
        vae.decode(&Buffer::new(VVAE_DTYPE_F32, LATENT), &mut Buffer::new(VVAE_DTYPE_F32, VIDEO)).unwrap();
        drop(vae);
        for (level, line) in log.into_inner().unwrap() {
            println!("{handle} {level} {}", line.lines().next().unwrap_or_default());
        }
    }
}

/// A process on the simulated driver: a plan is cancelled while it measures, and so is one that waits for it.
#[test]
#[ignore = "a child of the other tests"]
fn cancelled_child() {
    if std::env::var_os(SETTINGS).is_none() {
        return;
    }
    let table = PathBuf::from(std::env::var_os("CUDA_CACHE_PATH").unwrap()).join("video-vae/rates.json");
    let handles = [0, 1].map(|_| {
        let vae = Vae::open_on(c"cuda:0", &small()).unwrap();
        vae.configure("autotune", "on").unwrap();
        vae
    });
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let plans = handles.each_ref().map(|vae| scope.spawn(|| vae.plan("decode", LATENT).unwrap_err().status));
        while !plans.iter().all(|plan| plan.is_finished()) {
            std::thread::sleep(Duration::from_millis(100));
            handles.iter().for_each(|vae| drop(vae.cancel()));
        }
        assert_eq!(plans.map(|plan| plan.join().unwrap()), [VVAE_ERROR_CANCELLED; 2]);
    });
    // No hang. The status says that it was cancelled; a busy machine may take longer than the measurement would.
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    assert!(!table.exists());
    handles[1].plan("decode", LATENT).unwrap();
    assert!(table.exists());
}

/// The simulated driver, and what a process on it does with the driver's cache in `cache`.
struct Machine(Folder);

impl Machine {
    /// `None` without a C compiler.
    fn new(name: &str) -> Option<Machine> {
        let folder = Folder::new(name);
        let mut compile = Command::new(std::env::var_os("CC").unwrap_or("cc".into()));
        compile
            .args(["-std=gnu11", "-O1", "-w", "-pthread", "-fPIC", "-shared", "-o"])
            .arg(folder.0.join("libcuda.so"));
        match compile.arg(root().join("tests/c/simulated_driver.c")).output() {
            Err(why) if std::env::var_os("CI").is_none() => {
                println!("skipped: no C compiler: {why}");
                return None;
            }
            built => assert!(built.expect("a C compiler").status.success()),
        }
        std::fs::create_dir(folder.0.join("cache")).unwrap();
        Some(Machine(folder))
    }

    fn cache(&self) -> PathBuf {
        self.0.0.join("cache")
    }

    fn table(&self) -> PathBuf {
        self.cache().join("video-vae/rates.json")
    }

    /// The output of a test of this file, in a process of its own.
    fn spawn(&self, test: &str, settings: &str) -> String {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", test, "--ignored", "--nocapture"]).env(SETTINGS, settings);
        child.env("LD_LIBRARY_PATH", &self.0.0).env("CUDA_CACHE_PATH", self.cache()).env("HOME", self.cache());
        let output = child.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        text
    }

    /// What the process said: rates of its plans, and lines about `autotune` by handle and level.
    fn run(&self, settings: &str) -> Said {
        let text = self.spawn("child", settings);
        let lines = |has: &str| text.lines().filter(|line| line.contains(has)).map(str::to_owned).collect::<Vec<_>>();
        let rates = lines(" rates: ").iter().map(|line| line[2..].to_owned()).collect();
        Said { rates, notes: lines(" autotune: ") }
    }
}

#[derive(Debug)]
struct Said {
    rates: Vec<String>,
    notes: Vec<String>,
}

fn names(folder: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(folder).map_or(Vec::new(), |files| files.map(|file| file.unwrap().path()).collect())
}

#[test]
fn rates_are_measured_once_and_read_afterwards() {
    let Some(machine) = Machine::new("autotune") else { return };
    let derived = machine.run("");
    assert!(derived.notes.is_empty() && derived.rates.len() == 2, "{derived:?}");
    assert_eq!(machine.run("autotune=off autotune_path=x/rates.json").notes, Vec::<String>::new());
    assert_eq!(names(&machine.cache()), Vec::<PathBuf>::new(), "nothing is written unless asked for");

    let first = machine.run("autotune=on");
    assert!(first.notes.len() == 1 && first.notes[0].starts_with("0 1 autotune: rates products="), "{first:?}");
    assert!(first.notes[0].contains(" were measured in "), "{first:?}");
    assert!(first.rates[0] == first.rates[1] && first.rates[0] != derived.rates[0], "{first:?} {derived:?}");
    assert_eq!(names(machine.table().parent().unwrap()), [machine.table()]);
    let stored = std::fs::read(machine.table()).unwrap();

    let second = machine.run("autotune=on");
    assert!(second.notes.len() == 1 && second.notes[0].contains(" were read from "), "{second:?}");
    assert_eq!(second.rates, first.rates);
    assert_eq!(std::fs::read(machine.table()).unwrap(), stored);

    let given = machine.run("autotune=on rates=products=1e12,memory=1e11,copies=1e10");
    assert_eq!(given.rates, vec!["rates: products=1e12,memory=1e11,copies=1e10"; 2]);
    assert_eq!(machine.run("autotune=on autotune=off").notes, Vec::<String>::new());
}

#[test]
fn other_precisions_and_formats_are_measured_again() {
    let Some(machine) = Machine::new("autotune-again") else { return };
    std::fs::create_dir(machine.cache().join("video-vae")).unwrap();
    std::fs::write(machine.table(), b"{\"format\": 0, \"rates\": [{}]}").unwrap();
    for settings in ["autotune=on", "autotune=on precision=bf16"] {
        let said = machine.run(settings);
        assert!(said.notes.len() == 1 && said.notes[0].contains(" were measured in "), "{said:?}");
    }
    let table: serde_json::Value = serde_json::from_slice(&std::fs::read(machine.table()).unwrap()).unwrap();
    assert_eq!(table["rates"].as_array().unwrap().len(), 2, "{table}");
}

#[test]
fn a_table_that_cannot_be_written_is_a_warning() {
    let Some(machine) = Machine::new("autotune-unwritable") else { return };
    let said = machine.run("autotune=on autotune_path=/dev/null/rates.json");
    assert_eq!(said.notes.len(), 2, "measured by the first handle only: {said:?}");
    assert!(said.notes[1].starts_with("0 2 autotune: autotune_path: /dev/null/rates.json"), "{said:?}");
    assert_eq!(said.rates[0], said.rates[1]);
    assert_eq!(names(&machine.cache()), Vec::<PathBuf>::new(), "the default place is not used");
}

#[test]
fn a_file_that_is_no_table_survives() {
    let Some(machine) = Machine::new("autotune-other") else { return };
    let path = machine.cache().join("notes.txt");
    std::fs::write(&path, b"something else").unwrap();
    let said = machine.run(&format!("autotune=on autotune_path={}", path.display()));
    assert!(said.notes.len() == 2 && said.notes[1].contains(" exists and is no table"), "{said:?}");
    assert_eq!(std::fs::read(&path).unwrap(), b"something else");
}

#[test]
fn a_cancel_ends_measuring_and_nothing_is_kept() {
    let Some(machine) = Machine::new("autotune-cancel") else { return };
    machine.spawn("cancelled_child", "autotune=on");
    assert!(machine.table().exists());
}

#[test]
fn the_cpu_measures_nothing_and_wrong_values_are_refused() {
    let folder = Folder::new("autotune-cpu");
    let path = folder.0.join("rates.json");
    let vae = Vae::open_on(c"cpu", &small()).unwrap();
    let before = vae.plan("decode", LATENT).unwrap().1;
    for value in ["", "yes", "true", "ON", "rates.json"] {
        let says = ["autotune", &format!("\"{value}\""), "one of off, on"];
        vae.configure("autotune", value).unwrap_err().says(VVAE_ERROR_ARGUMENT, &says);
    }
    vae.configure("autotune_path", path.to_str().unwrap()).unwrap();
    vae.configure("autotune", "on").unwrap();
    assert_eq!(vae.plan("decode", LATENT).unwrap().1, before);
    assert!(!path.exists());
}
