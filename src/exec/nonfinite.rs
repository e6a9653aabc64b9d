//! Values that are NaN or infinite: loads and stores find them, and the host is told.

use super::settings::OnNonFinite;
use super::{Control, check};
use crate::backend::NonFinite;
use crate::error::{Error, Result};
use crate::model::Direction;

/// Reports the non-finite values of a finished call to the host.
pub fn report(seen: NonFinite, policy: OnNonFinite, direction: Direction, control: &Control) -> Result<()> {
    let node = direction.name();
    let what = match seen {
        NonFinite { loaded: true, .. } => format!(
            "{node}: the {} has values that are NaN or infinite; the output frames that depend on them are not finite, \
             and 0 in integers",
            check::ends(direction).0.name()
        ),
        NonFinite { stored: true, .. } => format!(
            "{node}: values became NaN or infinite on the way, so output frames are not finite, and 0 in integers; \
             with precision fp16, try bf16 or fp32"
        ),
        NonFinite { loaded: false, stored: false } => return Ok(()),
    };
    match policy {
        OnNonFinite::Fail => Err(Error::Tensor(format!(
            "{what}. nonfinite=error makes this a failure; repair the input, or set nonfinite to propagate"
        ))),
        OnNonFinite::Propagate => {
            control.warn(format_args!("{what}"));
            Ok(())
        }
    }
}

/// Ends a stream of `precision=auto`: what it has given out is fp16.
pub fn overflowed_stream(direction: Direction) -> Error {
    Error::Tensor(format!(
        "{}: values overflow in fp16, which precision=auto began with, and a stream cannot be repeated; open another \
         with precision=bf16",
        direction.name()
    ))
}
