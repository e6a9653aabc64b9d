using System;
using System.Threading;

namespace VideoVae
{
    /// <summary>What a call came to, in the numbers of video_vae.h.</summary>
    public enum VaeStatus
    {
        Ok = Native.VVAE_OK,
        Again = Native.VVAE_AGAIN,
        End = Native.VVAE_END,
        Argument = Native.VVAE_ERROR_ARGUMENT,
        Tensor = Native.VVAE_ERROR_TENSOR,
        Checkpoint = Native.VVAE_ERROR_CHECKPOINT,
        Device = Native.VVAE_ERROR_DEVICE,
        Memory = Native.VVAE_ERROR_MEMORY,
        Cancelled = Native.VVAE_ERROR_CANCELLED,
        State = Native.VVAE_ERROR_STATE,
        Internal = Native.VVAE_ERROR_INTERNAL,
    }

    /// <summary>A call of the library failed. The message is the library's own.</summary>
    public class VaeException : Exception
    {
        public VaeException(VaeStatus status, string message) : base(message)
        {
            Status = status;
        }

        public VaeStatus Status { get; }
    }

    /// <summary>An argument or a setting is not what the library takes.</summary>
    public sealed class VaeArgumentException : VaeException
    {
        internal VaeArgumentException(VaeStatus status, string message) : base(status, message) { }
    }

    /// <summary>A tensor's shape, strides, type or device do not fit the call.</summary>
    public sealed class VaeTensorException : VaeException
    {
        internal VaeTensorException(VaeStatus status, string message) : base(status, message) { }
    }

    /// <summary>A file cannot be read or written, or is no checkpoint of this model.</summary>
    public sealed class VaeCheckpointException : VaeException
    {
        internal VaeCheckpointException(VaeStatus status, string message) : base(status, message) { }
    }

    /// <summary>The device named does not exist or cannot be used.</summary>
    public sealed class VaeDeviceException : VaeException
    {
        internal VaeDeviceException(VaeStatus status, string message) : base(status, message) { }
    }

    /// <summary>Neither the limit nor the machine has room for the job.</summary>
    public sealed class VaeMemoryException : VaeException
    {
        internal VaeMemoryException(VaeStatus status, string message) : base(status, message) { }
    }

    /// <summary>The call came at the wrong time, such as while another one runs on the same <see cref="Vae"/>.</summary>
    public sealed class VaeStateException : VaeException
    {
        internal VaeStateException(VaeStatus status, string message) : base(status, message) { }
    }

    /// <summary>A run was stopped. An <see cref="OperationCanceledException"/>, as .NET programs expect.</summary>
    public sealed class VaeCanceledException : OperationCanceledException
    {
        internal VaeCanceledException(string message, long frames, CancellationToken token) : base(message, token)
        {
            Frames = frames;
        }

        public VaeStatus Status { get { return VaeStatus.Cancelled; } }

        /// <summary>Of <see cref="VaeStream.Pull(Tensor, RunOptions, CancellationToken)"/>: the frames it had written, which count.</summary>
        public long Frames { get; }
    }

    internal static unsafe class Error
    {
        /// <summary>The status of a call that was just made on this thread, if it is no failure.</summary>
        public static VaeStatus Check(int status)
        {
            if (status < 0) throw Of(status, 0, CancellationToken.None);
            return (VaeStatus)status;
        }

        public static Exception Of(int status, long frames, CancellationToken token)
        {
            string text = LastText();
            var kind = (VaeStatus)status;
            switch (kind)
            {
                case VaeStatus.Argument: return new VaeArgumentException(kind, text);
                case VaeStatus.Tensor: return new VaeTensorException(kind, text);
                case VaeStatus.Checkpoint: return new VaeCheckpointException(kind, text);
                case VaeStatus.Device: return new VaeDeviceException(kind, text);
                case VaeStatus.Memory: return new VaeMemoryException(kind, text);
                case VaeStatus.State: return new VaeStateException(kind, text);
                case VaeStatus.Cancelled: return new VaeCanceledException(text, frames, token);
                default: return new VaeException(kind, text);
            }
        }

        // With no handle, the text is that of the calling thread, so another thread's failure cannot come between.
        private static string LastText()
        {
            var text = new byte[Native.vvae_error(IntPtr.Zero, null, 0) + 1];
            fixed (byte* bytes = text)
            {
                Native.vvae_error(IntPtr.Zero, bytes, (ulong)text.Length);
                return Utf8.Text(bytes, text.Length);
            }
        }
    }
}
