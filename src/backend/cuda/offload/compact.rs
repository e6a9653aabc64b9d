//! Compact copies of frames of host tensors, which the copy engines move in one piece.

use crate::tensor::View;

/// Rows and columns of a tensor.
#[derive(Clone, Copy)]
pub struct Area {
    pub top: u64,
    pub left: u64,
    pub rows: u64,
    pub columns: u64,
}

impl Area {
    pub fn whole(view: &View) -> Area {
        Area { top: 0, left: 0, rows: view.shape().height, columns: view.shape().width }
    }
}

/// How a compact copy is laid out: as the tensor itself is, as far as that is compact.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    Planar,
    Interleaved,
}

/// An area of a frame of a tensor in host memory.
#[derive(Clone, Copy)]
pub struct Piece {
    view: View,
    batch: u64,
    frame: u64,
    area: Area,
    order: Order,
}

impl Piece {
    pub fn new(view: &View, batch: u64, frame: u64, area: Area) -> Piece {
        let interleaved = view.strides()[1] == 1 && view.shape().channels > 1;
        let order = if interleaved { Order::Interleaved } else { Order::Planar };
        Piece { view: *view, batch, frame, area, order }
    }

    /// Bytes of the compact copy.
    pub fn bytes(&self) -> u64 {
        self.area.rows * self.area.columns * self.view.shape().channels * self.view.dtype().bytes()
    }

    /// Strides of the compact copy by channel, row and column.
    pub fn strides(&self) -> [i64; 3] {
        let (rows, columns) = (self.area.rows as i64, self.area.columns as i64);
        let channels = self.view.shape().channels as i64;
        match self.order {
            Order::Planar => [rows * columns, columns, 1],
            Order::Interleaved => [1, columns * channels, channels],
        }
    }

    /// Makes the compact copy.
    ///
    /// # Safety
    /// `into` has room for it, and the view is of host memory that may be read now.
    pub unsafe fn gather(&self, into: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { self.for_each_run(into, |place, compact, bytes| compact.copy_from_nonoverlapping(place, bytes)) }
    }

    /// Brings a compact copy to the tensor.
    ///
    /// # Safety
    /// `from` is one, and the view is of host memory that may be written now.
    pub unsafe fn scatter(&self, from: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { self.for_each_run(from, |place, compact, bytes| place.copy_from_nonoverlapping(compact, bytes)) }
    }

    /// Calls `visit` with every run of bytes that lie side by side both in the tensor and in the compact copy.
    ///
    /// # Safety
    /// `compact` has room for the area.
    unsafe fn for_each_run(&self, compact: *mut u8, visit: impl Fn(*mut u8, *mut u8, usize)) {
        let (view, area) = (&self.view, self.area);
        let element = view.dtype().bytes() as usize;
        let [_, by_channel, _, by_row, by_column] = view.strides().map(|stride| stride as isize);
        let channels = view.shape().channels as usize;
        let (rows, columns) = (area.rows as usize, area.columns as usize);
        let start = view.frame(self.batch, self.frame);
        // `steps` runs make a line, `step` elements of the tensor apart.
        let (lines, run, steps, step) = match self.order {
            Order::Interleaved if by_column == channels as isize => (1, columns * channels, 1, 0),
            Order::Interleaved => (1, channels, columns, by_column),
            Order::Planar if by_column == 1 => (channels, columns, 1, 0),
            Order::Planar => (channels, 1, columns, by_column),
        };
        let bytes = run * element;
        let mut compact = compact;
        for line in 0..lines {
            for y in 0..rows {
                let row = line as isize * by_channel + (area.top as isize + y as isize) * by_row;
                let at = row + area.left as isize * by_column;
                for s in 0..steps {
                    visit(start.wrapping_offset((at + s as isize * step) * element as isize), compact, bytes);
                    // SAFETY: the caller's promise.
                    compact = unsafe { compact.add(bytes) };
                }
            }
        }
    }
}
