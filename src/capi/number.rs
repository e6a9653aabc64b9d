//! Numbers that cross the boundary, and the places that results are written to.

use crate::error::{Error, Result};

/// A number of the host that must not be negative.
pub(super) fn unsigned(argument: &str, value: i64) -> Result<u64> {
    u64::try_from(value).map_err(|_| Error::Argument(format!("{argument}: {value} is negative")))
}

/// A plan's numbers always fit; saturating is for the compiler.
pub(super) fn signed(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// Checks the pointer that `what` is written to.
pub(super) fn check_place<T>(argument: &str, to: *mut T, what: &str) -> Result<()> {
    if to.is_null() {
        return Err(Error::Argument(format!("{argument} is null; it must point to where {what} goes")));
    }
    Ok(())
}
