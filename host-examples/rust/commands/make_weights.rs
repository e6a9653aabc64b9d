//! `vvae make-weights`: a random checkpoint of the real layout.

use std::path::Path;

use super::Command;
use crate::args::{Args, Takes};
use crate::checkpoint::Config;
use crate::say::say;
use crate::tensor::Dtype;
use crate::{Result, random_weights, units};

pub const COMMAND: Command = Command {
    name: "make-weights",
    summary: "a random checkpoint, for measuring and testing",
    usage: "OUT.safetensors [OPTIONS]",
    about: "\
Writes a checkpoint with the names and shapes of the published one and random values, scaled so that activations stay
near unit size. It measures as the real one does, and shows nothing. The same options give the same file.
",
    help: &["\
Options:
  --channels LIST       of each level, from full resolution down; default: 128,256,512,512
  --layers N            residual blocks of an encoder level; default: 2
  --latent N            channels of a latent; default: 16
  --groups N            of the norms; default: 32
  --temporal N          changes of resolution that also change the frame rate; default: 2
  --seed N              default: 0
  --dtype f16|bf16|f32  default: f16, as published
"],
    examples: "  vvae make-weights random.safetensors\n  \
               vvae make-weights tiny.safetensors --channels 16,32,32,32 --groups 16 --dtype f32 --seed 7\n",
    takes: Takes {
        required: &["OUT.safetensors"],
        optional: &[],
        valued: &[&["channels", "layers", "latent", "groups", "temporal", "seed", "dtype"]],
        flags: &[],
    },
    run,
};

fn run(args: &Args) -> Result<()> {
    let default = Config::published();
    let channels = match args.option("channels") {
        None => default.channels,
        Some(list) => list
            .split(',')
            .map(|part| {
                part.trim().parse().map_err(|_| format!("--channels: \"{list}\" is no list like 128,256,512,512"))
            })
            .collect::<Result<Vec<u64>>>()?,
    };
    let config = Config {
        channels,
        layers: args.parsed("layers", default.layers, "2")?,
        latent: args.parsed("latent", default.latent, "16")?,
        groups: args.parsed("groups", default.groups, "32")?,
        temporal: args.parsed("temporal", default.temporal, "2")?,
    };
    config.check()?;
    let dtype = Dtype::parse(args.choice("dtype", &["f16", "bf16", "f32"])?).unwrap_or(Dtype::F16);
    let path = Path::new(args.word(0).expect("required words are there"));
    let parameters = random_weights::write(path, &config, dtype, args.parsed("seed", 0, "7")?)?;
    say!("{}: {} random parameters in {}", path.display(), units::grouped(parameters), dtype.name())
}
