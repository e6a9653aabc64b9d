//! `vvae plan`: what a job would take, before anything runs.

use super::Command;
use crate::args::{Args, Takes};
use crate::checkpoint::Config;
use crate::options;
use crate::say::say;
use crate::tensor::{Dtype, FrameKind};
use crate::vae::Vae;
use crate::{Result, random_weights, units};

pub const COMMAND: Command = Command {
    name: "plan",
    summary: "memory and cuts of a job, before it runs",
    usage: "--decode FRAMESxHEIGHTxWIDTH | --encode FRAMESxHEIGHTxWIDTH [OPTIONS]",
    about: "\
Says how a job would be cut to keep to a limit, and how much memory it would take, which is what it then takes. Sizes are
those of the video in both directions. Without --weights and $VIDEO_VAE_WEIGHTS the plan is for the sizes of the published
checkpoint, which need not be there.
",
    help: &[
        "Options:\n  --decode TxHxW      plan a decode to a video of this size\n  \
         --encode TxHxW      plan an encode of a video of this size\n",
        options::MODEL_HELP,
    ],
    examples: "  vvae plan --decode 121x1080x1920 --limit 6GiB\n  \
               vvae plan --encode 121x720x1280 --decode 121x720x1280 --weights ema_vae_fp16.safetensors\n",
    takes: Takes { required: &[], optional: &[], valued: &[&["decode", "encode"], options::MODEL], flags: &[] },
    run,
};

fn run(args: &Args) -> Result<()> {
    let jobs: Vec<_> = ["encode", "decode"].into_iter().filter_map(|node| Some((node, args.option(node)?))).collect();
    if jobs.is_empty() {
        return Err("say what to plan, such as: vvae plan --decode 121x1080x1920 --limit 6GiB".into());
    }
    let (blank, path);
    match options::named_weights(args) {
        Some(named) => {
            say!("for the checkpoint {}", named.display())?;
            path = named;
        }
        None => {
            blank = random_weights::blank(&Config::published(), Dtype::F16)?;
            say!("for the published checkpoint's sizes")?;
            path = blank.path.clone();
        }
    }
    let vae = options::open_vae_with(args, &path)?;
    for (node, size) in jobs {
        let size = units::sizes(size, "121x1080x1920").map_err(|why| format!("--{node}: {why}"))?;
        say!("\n{}", describe(&vae, node, size)?)?;
    }
    Ok(())
}

/// The plan of a video of this many frames, rows and columns, in words.
pub fn describe(vae: &Vae, node: &str, [frames, height, width]: [u64; 3]) -> Result<String> {
    let (height, width) = (height as usize, width as usize);
    let shape = if node == "encode" {
        FrameKind::pixels(Dtype::U8, width, height).shape(frames)
    } else {
        FrameKind::latent(Dtype::F32, vae.latent_size(width, height)).shape(vae.latent_frames(frames))
    };
    Ok(vae.plan(node, shape)?.1.trim_end().to_owned())
}
