using System;
using System.Runtime.ExceptionServices;
using System.Runtime.InteropServices;
using System.Threading;

namespace VideoVae
{
    /// <summary>How far a run has come.</summary>
    public struct VaeProgress
    {
        public VaeProgress(ulong done, ulong total, string stage)
        {
            Done = done;
            Total = total;
            Stage = stage;
        }

        public ulong Done { get; }

        /// <summary>0 where the end is not known.</summary>
        public ulong Total { get; }

        /// <summary>"plan", "load", "encode" or "decode".</summary>
        public string Stage { get; }

        public double Fraction { get { return Total == 0 ? 0 : (double)Done / Total; } }
    }

    /// <summary>What may go with one run.</summary>
    public sealed class RunOptions
    {
        /// <summary>Told on the thread of the run. What it throws stops the run and comes out of it.</summary>
        public IProgress<VaeProgress> Progress { get; set; }

        /// <summary>Encode: where to write the log-variance.</summary>
        public Tensor? LogVariance { get; set; }

        /// <summary>The CUstream to order work on, if all tensors are on its device; the call then returns without waiting.</summary>
        public IntPtr? CudaStream { get; set; }
    }

    /// <summary>Marks what native code calls, for compilers that work ahead of time, such as Unity's; they know it by name.</summary>
    [AttributeUsage(AttributeTargets.Method)]
    internal sealed class MonoPInvokeCallbackAttribute : Attribute
    {
        public MonoPInvokeCallbackAttribute(Type type) { }
    }

    /// <summary>
    /// The managed side of one run: progress and cancellation. The delegate that the library calls is one for all runs and
    /// never collected; which run it is about comes back as the user pointer.
    /// </summary>
    internal sealed unsafe class RunCall : IDisposable
    {
        private static readonly Native.vvae_progress_fn Teller = Tell;
        private static readonly IntPtr TellerPointer = Marshal.GetFunctionPointerForDelegate(Teller);

        private readonly IProgress<VaeProgress> progress;
        private readonly CancellationToken token;
        private readonly CancellationTokenRegistration registration;
        private GCHandle self;
        private Exception thrown;

        public RunCall(VaeHandle vae, IProgress<VaeProgress> progress, CancellationToken token)
        {
            token.ThrowIfCancellationRequested();
            this.progress = progress;
            this.token = token;
            if (token.CanBeCanceled) registration = token.Register(Cancel, vae);
            if (progress != null || token.CanBeCanceled) self = GCHandle.Alloc(this);
        }

        public void Describe(RunOptions options, Native.vvae_run_info* to)
        {
            *to = new Native.vvae_run_info { struct_size = (uint)sizeof(Native.vvae_run_info) };
            if (self.IsAllocated)
            {
                to->progress = TellerPointer;
                to->progress_user = GCHandle.ToIntPtr(self).ToPointer();
            }
            if (options != null && options.CudaStream != null)
            {
                to->flags = Native.VVAE_RUN_HAS_STREAM;
                to->cuda_stream = options.CudaStream.Value.ToPointer();
            }
        }

        /// <summary>Throws what the progress threw, or else what the status says.</summary>
        public VaeStatus Check(int status, long frames = 0)
        {
            if (thrown != null) ExceptionDispatchInfo.Capture(thrown).Throw();
            if (status < 0) throw Error.Of(status, frames, token);
            return (VaeStatus)status;
        }

        public void Dispose()
        {
            registration.Dispose(); // waits for a Cancel that is under way
            if (self.IsAllocated) self.Free();
        }

        // On whichever thread cancels the token. It may come before the library has begun, when there is nothing to stop
        // yet; so Tell looks at the token, too.
        private static void Cancel(object vae)
        {
            try
            {
                Native.vvae_cancel((VaeHandle)vae);
            }
            catch (ObjectDisposedException)
            {
                // Disposed during the run, which Tell then stops.
            }
        }

        [MonoPInvokeCallback(typeof(Native.vvae_progress_fn))]
        private static int Tell(void* user, ulong done, ulong total, byte* stage)
        {
            var run = (RunCall)GCHandle.FromIntPtr((IntPtr)user).Target;
            try
            {
                if (run.progress != null) run.progress.Report(new VaeProgress(done, total, Utf8.Text(stage)));
                return run.token.IsCancellationRequested ? 1 : 0;
            }
            catch (Exception error)
            {
                // Nothing may be thrown through native code.
                run.thrown = error;
                return 1;
            }
        }
    }
}
