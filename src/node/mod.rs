//! The nodes, their ports and parameters, in one table. Discovery, parsing, defaults and the documented list of
//! parameters all come from it. Texts are C strings: the ABI passes them on as they are.

mod docs;
mod params;
mod parse;
mod ports;

pub use docs::markdown;
pub use params::{PARAMS, Param, ParamKind, Value};
pub use ports::{NODES, Node, Port};

use crate::backend::cpu::Instructions;
use crate::error::{Error, Result};
use crate::exec::{Latent, Latents, Limit, OnNonFinite, PixelRange, Settings, Tiling};
use crate::ir::{CacheFormat, GivenRates};
use crate::model::Direction;

/// Sets one parameter from its text. A failure changes nothing.
pub fn configure(settings: &mut Settings, key: &str, value: &str) -> Result<()> {
    let Some(param) = PARAMS.iter().find(|p| p.key() == key) else {
        return Err(Error::Argument(unknown_key(key)));
    };
    let mut changed = settings.clone();
    (param.set)(&mut changed, parse::value(param, value)?);
    check_tiles(&changed, key)?;
    check_scaling(&changed, key)?;
    *settings = changed;
    Ok(())
}

/// Refuses tiles that are asked for and forbidden. `key` was set last.
fn check_tiles(settings: &Settings, key: &str) -> Result<()> {
    let mut tiled = ["encode_tiled", "decode_tiled"].into_iter().zip(settings.tiling);
    let asked = tiled.find(|(_, tiling)| tiling.enabled && !settings.allow_tiles);
    match asked {
        Some((asked, _)) if key == "tiles" => {
            Err(Error::Argument(format!("tiles: never contradicts {asked}=true; set {asked} to false first")))
        }
        Some((asked, _)) => {
            Err(Error::Argument(format!("{asked}: true contradicts tiles=never; set tiles to auto first")))
        }
        None => Ok(()),
    }
}

/// Refuses two scalings of latents. `key` was set last.
fn check_scaling(settings: &Settings, key: &str) -> Result<()> {
    match (settings.latents, settings.scaling_factor) {
        (Latents::Raw, _) | (Latents::Model, 1.0) => Ok(()),
        (Latents::Model, factor) => Err(Error::Argument(format!(
            "{key}: latents=model has the scale of the diffusion model, which contradicts scaling_factor={factor}; \
             set scaling_factor to 1, or latents to raw"
        ))),
    }
}

/// The settings of a new handle.
pub fn defaults() -> Settings {
    let blank = Tiling { enabled: false, size: 0, overlap: 0 };
    let mut settings = Settings {
        memory_limit: vec![Limit::Auto],
        mixed_devices: false,
        host_memory_limit: Limit::Auto,
        threads: None,
        instructions: Instructions::Auto,
        precision: None,
        pixel_range: PixelRange::Signed,
        scaling_factor: 0.0,
        latents: Latents::Raw,
        latent_format: None,
        posterior: Latent::Mean,
        seed: 0,
        cache: CacheFormat::Exact,
        allow_tiles: true,
        tiling: [blank; 2],
        slice_frames: None,
        chunk_frames: None,
        on_nonfinite: OnNonFinite::Propagate,
        device_like: None,
        rates: GivenRates::default(),
        autotune: false,
        autotune_path: None,
        trace: None,
    };
    for param in PARAMS {
        let value = parse::value(param, param.default()).expect("a default in the table that the table refuses");
        (param.set)(&mut settings, value);
    }
    settings
}

pub fn find(id: &str) -> Result<&'static Node> {
    NODES.iter().find(|n| n.id() == id).ok_or_else(|| {
        let ids: Vec<_> = NODES.iter().map(|n| format!("\"{}\"", n.id())).collect();
        Error::Argument(format!("node: \"{id}\" is unknown; nodes are {}", ids.join(" and ")))
    })
}

/// The node that runs in this direction.
pub fn of(direction: Direction) -> &'static Node {
    NODES.iter().find(|n| n.direction == direction).expect("each direction has a node")
}

fn unknown_key(key: &str) -> String {
    let keys: Vec<_> = PARAMS.iter().map(Param::key).collect();
    format!("key: \"{key}\" is unknown; keys are {}", keys.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Precision;

    #[test]
    fn defaults_are_those_of_the_peers() {
        let settings = defaults();
        let tiling = Tiling { enabled: false, size: 1024, overlap: 128 };
        assert_eq!(settings.tiling, [tiling; 2]);
        assert_eq!(settings.seed, 42);
        assert_eq!(settings.scaling_factor, 1.0);
        assert_eq!((settings.memory_limit, settings.mixed_devices), (vec![Limit::Auto], false));
        assert_eq!(settings.pixel_range, PixelRange::Signed);
        assert_eq!(settings.posterior, Latent::Mean);
        assert_eq!((settings.threads, settings.slice_frames, settings.chunk_frames), (None, None, None));
    }

    #[test]
    fn every_parameter_reaches_its_own_setting() {
        let samples = [
            ("memory_limit", "8GiB,auto"),
            ("host_memory_limit", "50%"),
            ("mixed_devices", "allow"),
            ("tiles", "never"),
            ("threads", "3"),
            ("instruction_set", "portable"),
            ("precision", "bf16"),
            ("cache", "u8"),
            ("pixel_range", "0..1"),
            ("scaling_factor", "0.75"),
            ("latents", "model"),
            ("latent_format", "sd3"),
            ("posterior", "sample"),
            ("seed", "18446744073709551615"),
            ("encode_tiled", "true"),
            ("encode_tile_size", "512"),
            ("encode_tile_overlap", "64"),
            ("decode_tiled", "true"),
            ("decode_tile_size", "768"),
            ("decode_tile_overlap", "32"),
            ("slice_frames", "4"),
            ("chunk_frames", "2"),
            ("nonfinite", "error"),
            ("device_like", "rtx4090"),
            ("rates", "memory=2e12"),
            ("autotune", "on"),
            ("autotune_path", "rates.json"),
            ("trace", "trace.json"),
        ];
        assert_eq!(samples.map(|(key, _)| key).to_vec(), PARAMS.iter().map(Param::key).collect::<Vec<_>>());
        let mut all = defaults();
        for (key, value) in samples {
            let before = all.clone();
            configure(&mut all, key, value).unwrap();
            assert_ne!(all, before, "{key}");
            match key {
                // Or the tiles and the latents that come later would be refused.
                "tiles" | "scaling_factor" => all = before,
                _ => {}
            }
        }
        let expected = Settings {
            memory_limit: vec![Limit::Bytes(8 << 30), Limit::Auto],
            mixed_devices: true,
            host_memory_limit: Limit::Percent(50),
            threads: Some(3),
            instructions: Instructions::Portable,
            precision: Some(Precision::Bf16),
            pixel_range: PixelRange::Unit,
            scaling_factor: 1.0,
            latents: Latents::Model,
            latent_format: Some("sd3"),
            posterior: Latent::Sample,
            seed: u64::MAX,
            cache: CacheFormat::U8,
            allow_tiles: true,
            tiling: [
                Tiling { enabled: true, size: 512, overlap: 64 },
                Tiling { enabled: true, size: 768, overlap: 32 },
            ],
            slice_frames: Some(4),
            chunk_frames: Some(2),
            on_nonfinite: OnNonFinite::Fail,
            device_like: Some("rtx4090"),
            rates: GivenRates { memory: Some(2e12), ..GivenRates::default() },
            autotune: true,
            autotune_path: Some("rates.json".into()),
            trace: all.trace.clone(),
        };
        assert_eq!(all, expected);
    }

    #[test]
    fn an_unknown_key_is_told_the_others() {
        let error = configure(&mut defaults(), &"x".repeat(1000), "1").unwrap_err().to_string();
        assert!(error.contains("keys are memory_limit, host_memory_limit"), "{error}");
    }

    #[test]
    fn tiles_are_not_asked_for_and_forbidden() {
        for node in ["encode", "decode"] {
            let tiled = format!("{node}_tiled");
            for (first, second) in [((&*tiled, "true"), ("tiles", "never")), (("tiles", "never"), (&*tiled, "true"))] {
                let mut settings = defaults();
                configure(&mut settings, first.0, first.1).unwrap();
                let before = settings.clone();
                let error = configure(&mut settings, second.0, second.1).unwrap_err().to_string();
                assert!(error.starts_with(second.0) && error.contains(first.0) && error.contains("first"), "{error}");
                assert_eq!(settings, before);
            }
        }
    }

    #[test]
    fn a_refused_value_changes_nothing() {
        let mut settings = defaults();
        // Every text is a path.
        for param in PARAMS.iter().filter(|param| !matches!(param.kind, ParamKind::Path)) {
            configure(&mut settings, param.key(), "not a value").unwrap_err();
        }
        assert_eq!(settings, defaults());
    }
}
