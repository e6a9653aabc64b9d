// How it behaves: discovery, errors, progress, cancel.
using System;
using System.Collections.Generic;
using System.Diagnostics;
using System.Linq;
using System.Threading;
using System.Threading.Tasks;
using VideoVae;

internal static partial class Program
{
    private sealed class Told : IProgress<VaeProgress>
    {
        public readonly List<VaeProgress> All = new List<VaeProgress>();
        public Action<VaeProgress> Then;

        public void Report(VaeProgress value)
        {
            All.Add(value);
            if (Then != null) Then(value);
        }
    }

    private static void Discovery()
    {
        Check.That(VaeLibrary.AbiVersion.Major == 2 && VaeLibrary.Version.Split('.').Length == 3, "versions");
        Check.That(VaeLibrary.Devices[0].Id == "cpu" && VaeLibrary.Devices[0].MemoryTotal > 0, "devices");
        VaeNode encode = VaeLibrary.Nodes.Single(node => node.Id == "encode");
        Check.That(encode.Ports.Select(port => port.Name).SequenceEqual(new[] { "video", "latent", "logvar" }), "ports");
        Check.That(encode.Ports[0].Elements.Contains(ElementType.UInt8) && encode.Ports[2].IsOptional, "ports");
        VaeParameter posterior = encode.Parameters.Single(parameter => parameter.Key == "posterior");
        Check.That(posterior.Kind == ParameterKind.Choice && posterior.Choices.SequenceEqual(new[] { "mean", "sample" }), "choices");
        using (Vae vae = Open())
        {
            // Every parameter takes its own default.
            foreach (VaeParameter parameter in VaeLibrary.Nodes.SelectMany(node => node.Parameters))
            {
                vae.Configure(parameter.Key, parameter.Default);
            }
            VaePlan plan = vae.Plan("encode", new Shape(1, 3, 9, 64, 96));
            Check.That(plan.Exact && plan.Output.Equals(new Shape(1, 16, 3, 8, 12)), plan.Text);
            Check.That(plan.DeviceBytes == plan.WeightBytes + plan.WorkspaceBytes && plan.ChunkFrames.Count == 4, plan.Text);
            Check.That(plan.Text.Contains("untiled: exact") && !plan.Text.Contains("\0"), plan.Text);
            VaeModel model = vae.Model;
            Check.That(model.Family == "seedvr2" && model.DecodedChannels == 3 && model.LatentFormats.Single() == "seedvr2", "model");
            Check.That(model.Latents.Format == "seedvr2" && model.Latents.Scale == 0.9152 && model.Latents.Means.Count == 0, "latents");
            string timeline = vae.PlanTimeline("encode", new Shape(1, 3, 9, 64, 96));
            Check.That(timeline.StartsWith("{\"devices\":[") && timeline.EndsWith("}]}"), timeline);
        }
    }

    private static void Errors()
    {
        Check.That(Check.Throws<VaeCheckpointException>(() => new Vae("/no/such/é.safetensors"), "/no/such/é.safetensors").Status
                   == VaeStatus.Checkpoint, "status");
        Check.Throws<VaeDeviceException>(() => new Vae($"{folder}/small.safetensors", "cuda:77"), "cuda:77");
        Check.Throws<ArgumentNullException>(() => new Vae(null));
        using (Vae vae = Open())
        {
            Check.Throws<VaeStateException>(() => vae.LastRun.ToString(), "no run");
            var shape = new Shape(1, 16, 2, 2, 3);
            var latent = new float[shape.Elements];
            Check.Throws<VaeArgumentException>(() => vae.Configure("threads", "many"), "threads", "\"many\"");
            Check.Throws<VaeArgumentException>(() => vae.Configure("nothing", 1), "nothing");
            Check.Throws<VaeTensorException>(() => vae.Decode(latent, shape, new float[100000], new Shape(1, 3, 3, 30, 24)));
            Check.Throws<VaeArgumentException>(() => vae.Plan("blur", shape), "blur");
            vae.Configure("memory_limit", "1KiB");
            Check.Throws<VaeMemoryException>(() => vae.Decode(latent, shape, new float[5760], vae.Model.VideoOf(shape)));
            vae.Configure("memory_limit", "auto");
            using (VaeStream stream = vae.OpenStream("decode", shape))
            {
                stream.Finish();
                Check.Throws<VaeStateException>(() => stream.Push<float>(latent, shape));
            }
            // From within a callback, the handle is in use.
            var told = new Told { Then = progress => vae.Trim() };
            Check.Throws<VaeStateException>(
                () => vae.Decode(latent, shape, new float[5760], vae.Model.VideoOf(shape), new RunOptions { Progress = told }));
        }
        Vae gone = Open();
        gone.Dispose();
        gone.Dispose();
        Check.Throws<ObjectDisposedException>(() => gone.Configure("threads", 1));
    }

    private static void Progress()
    {
        var lines = new List<string>();
        using (var vae = new Vae($"{folder}/small.safetensors", "cpu", (level, line) => lines.Add(line)))
        {
            Check.That(lines.Count > 0, "the log is silent");
            var shape = new Shape(1, 16, 3, 3, 4);
            Shape video = vae.Model.VideoOf(shape);
            float[] latent = Noise(shape.Elements, 3), right = new float[video.Elements], again = new float[video.Elements];
            var told = new Told();
            vae.Decode(latent, shape, right, video, new RunOptions { Progress = told });
            Check.That(told.All.Select(p => p.Stage).Distinct().SequenceEqual(new[] { "plan", "load", "decode" }), "stages");
            Check.That(told.All.Last().Fraction == 1, "it ends at its total");
            VaeRunReport report = vae.LastRun;
            VaePlan plan = vae.Plan("decode", shape);
            Check.That(report.Node == "decode" && report.Exact && report.TileRows == 1 && report.Seconds > 0, report.Text);
            Check.That(report.Text == plan.Text && report.DeviceBytes == plan.DeviceBytes, report.Text);

            // What progress throws comes out, and the handle goes on working.
            told.Then = progress => { throw new InvalidOperationException("mine"); };
            Check.Throws<InvalidOperationException>(
                () => vae.Decode(latent, shape, again, video, new RunOptions { Progress = told }), "mine");
            vae.Decode(latent, shape, again, video);
            Check.That(again.SequenceEqual(right), "after a stop");

            // A stream goes on where it was stopped, and the frames it had written count.
            using (VaeStream stream = vae.OpenStream("decode", shape))
            {
                stream.Push<float>(latent, shape);
                stream.Finish();
                long pulled = 0;
                int stops = 0;
                while (true)
                {
                    var source = new CancellationTokenSource();
                    int calls = 0;
                    told.Then = progress => { if (++calls == 8) source.Cancel(); };
                    try
                    {
                        Pulled got = stream.Pull<float>(again, video, new RunOptions { Progress = told }, source.Token);
                        pulled += got.Frames;
                        if (got.Status == VaeStatus.End) break;
                    }
                    catch (VaeCanceledException stop)
                    {
                        pulled += stop.Frames;
                        stops++;
                    }
                }
                Check.That(pulled == 9 && stops > 0, $"{pulled} frames, {stops} stops");
            }
        }
    }

    /// <summary>Work on frames of 1080p, which takes seconds, ends well within one.</summary>
    private static void Cancel()
    {
        using (Vae vae = Open())
        {
            vae.Configure("threads", 2); // so that it takes seconds on every machine
            var shape = new Shape(1, 16, 2, 135, 240);
            float[] latent = Noise(shape.Elements, 4);
            TensorLayout pixels = TensorLayout.Interleaved(5, 1080, 1920);
            var video = new byte[pixels.Shape.Elements];

            Check.Throws<OperationCanceledException>(
                () => vae.Decode(latent, shape, video, pixels, null, new CancellationToken(true)));

            long worst = 0;
            foreach (int delay in new[] { 0, 300, 700 })
            {
                var source = new CancellationTokenSource();
                var watch = new Stopwatch();
                Task run = vae.DecodeAsync<float, byte>(latent, shape, video, pixels, null, source.Token);
                Thread.Sleep(delay);
                watch.Start();
                source.Cancel();
                // A task that had not begun is cancelled by the task's own machinery.
                var error = Check.Throws<AggregateException>(() => run.Wait()).InnerException;
                worst = Math.Max(worst, watch.ElapsedMilliseconds);
                Check.That(error is OperationCanceledException && run.IsCanceled, $"{error}");
            }
            Console.WriteLine($"cancel took at most {worst} ms");
            Check.That(worst < 1000, "cancel took too long");

            var stop = Check.Throws<VaeCanceledException>(() =>
            {
                using (new Timer(_ => vae.Cancel(), null, 300, Timeout.Infinite)) vae.Decode(latent, shape, video, pixels);
            });
            Check.That(stop.Status == VaeStatus.Cancelled && stop.Message.Contains("cancelled"), stop.Message);
            vae.Decode(Noise(16 * 4, 1), new Shape(1, 16, 1, 2, 2), new float[3 * 256], new Shape(1, 3, 1, 16, 16));
        }
    }
}
