//! What all handles on a device share: its kernels, memory for their parameters, and the queues that hold work.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::device::Device;
use super::memory::MappedMemory;
use super::pipeline::Pipelines;
use crate::error::Result;

/// A queue that may hold work which was not given to the device yet.
pub trait OpenQueue: Send + Sync {
    fn submit(&self, context: &Context);
}

pub struct Context {
    /// Dropped before the device, as fields are in their order.
    pub pipelines: Pipelines,
    /// Memory for parameters that no launch reads.
    pub parameters: Mutex<Vec<MappedMemory>>,
    /// What queues hold is submitted before memory is freed.
    open_queues: Mutex<Vec<Weak<dyn OpenQueue>>>,
    pub device: Arc<Device>,
}

impl Context {
    /// The device, opened once for all handles. One that was lost is opened anew.
    pub fn shared(index: u32) -> Result<Arc<Context>> {
        static OPEN: Mutex<Vec<(u32, Weak<Context>)>> = Mutex::new(Vec::new());
        let mut open = OPEN.lock();
        open.retain(|(_, context)| context.upgrade().is_some_and(|context| !context.device.is_lost()));
        if let Some(context) = open.iter().find(|(known, _)| *known == index).and_then(|(_, known)| known.upgrade()) {
            return Ok(context);
        }
        let device = Arc::new(Device::open(index)?);
        let context = Arc::new(Context {
            pipelines: Pipelines::new(&device)?,
            parameters: Mutex::default(),
            open_queues: Mutex::default(),
            device,
        });
        open.push((index, Arc::downgrade(&context)));
        Ok(context)
    }

    pub fn add_queue(&self, queue: Weak<dyn OpenQueue>) {
        let mut open = self.open_queues.lock();
        open.retain(|queue| queue.strong_count() > 0);
        open.push(queue);
    }

    /// Waits for everything that any queue holds.
    pub fn wait_idle(&self) {
        let open: Vec<_> = self.open_queues.lock().iter().filter_map(Weak::upgrade).collect();
        open.iter().for_each(|queue| queue.submit(self));
        self.device.wait_idle();
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        self.device.wait_idle();
    }
}
