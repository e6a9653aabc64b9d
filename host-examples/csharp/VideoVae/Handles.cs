using System;
using System.Runtime.InteropServices;

namespace VideoVae
{
    /// <summary>A `vvae *`. Freed once it is disposed or forgotten, and neither a call nor a stream uses it any more.</summary>
    internal sealed class VaeHandle : SafeHandle
    {
        /// <summary>What the library logs to: it must not be collected while the handle lives.</summary>
        private GCHandle log;

        public VaeHandle() : base(IntPtr.Zero, true) { }

        public override bool IsInvalid { get { return handle == IntPtr.Zero; } }

        public void Keep(GCHandle log)
        {
            this.log = log;
        }

        protected override bool ReleaseHandle()
        {
            int status = Native.vvae_free(handle);
            if (log.IsAllocated) log.Free();
            return status == Native.VVAE_OK;
        }
    }

    /// <summary>A `vvae_stream *`. Holds on to its vae, as the library frees no vae that is in use.</summary>
    internal sealed class StreamHandle : SafeHandle
    {
        private VaeHandle parent;

        public StreamHandle() : base(IntPtr.Zero, true) { }

        public override bool IsInvalid { get { return handle == IntPtr.Zero; } }

        public void HoldOn(VaeHandle vae)
        {
            bool held = false;
            vae.DangerousAddRef(ref held);
            if (held) parent = vae;
        }

        protected override bool ReleaseHandle()
        {
            int status = Native.vvae_stream_close(handle);
            if (parent != null) parent.DangerousRelease();
            return status == Native.VVAE_OK;
        }
    }
}
