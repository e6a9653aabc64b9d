// What a C# program that uses video-vae looks like.
//
//     sample info                                          devices, nodes, ports and parameters
//     sample roundtrip CHECKPOINT [FRAMES HEIGHT WIDTH]    a clip to latents and back; Ctrl-C stops it
using System;
using System.Linq;
using System.Threading;
using VideoVae;

internal static class Program
{
    private static int Main(string[] words)
    {
        try
        {
            if (words.Length == 1 && words[0] == "info") return Info();
            if (words.Length == 2 && words[0] == "roundtrip") return RoundTrip(words[1], 9, 64, 96);
            if (words.Length == 5 && words[0] == "roundtrip")
            {
                return RoundTrip(words[1], long.Parse(words[2]), long.Parse(words[3]), long.Parse(words[4]));
            }
            Console.Error.WriteLine("usage: sample info | sample roundtrip CHECKPOINT [FRAMES HEIGHT WIDTH]");
            return 2;
        }
        catch (OperationCanceledException)
        {
            Console.Error.WriteLine("\nstopped");
            return 130;
        }
        catch (VaeException error)
        {
            Console.Error.WriteLine($"{error.Message} (status {error.Status})");
            return 1;
        }
    }

    private static int Info()
    {
        Console.WriteLine($"video-vae {VaeLibrary.Version}, ABI {VaeLibrary.AbiVersion}");
        foreach (VaeDevice device in VaeLibrary.Devices)
        {
            string gpu = device.Type == DeviceType.Cuda ? $", compute capability {device.ComputeCapability}, {device.Uuid}" : "";
            Console.WriteLine($"device {device.Id}: {device.Name}{gpu}, {device.MemoryFree >> 20} of {device.MemoryTotal >> 20} MiB free");
        }
        foreach (VaeNode node in VaeLibrary.Nodes)
        {
            Console.WriteLine($"\n{node.Id}: {node.Help}");
            foreach (VaePort port in node.Ports)
            {
                string optional = port.IsOptional ? ", optional" : "";
                Console.WriteLine($"  {(port.IsInput ? "in " : "out")} {port.Name} ({port.Kind}{optional}): {string.Join(", ", port.Elements)}");
            }
            foreach (VaeParameter parameter in node.Parameters)
            {
                string choices = parameter.Choices.Any() ? " of " + string.Join(" | ", parameter.Choices) : "";
                Console.WriteLine($"  {parameter.Key} = {parameter.Default} ({parameter.Kind}{choices}): {parameter.Help}");
            }
        }
        return 0;
    }

    private static int RoundTrip(string checkpoint, long frames, long height, long width)
    {
        var stop = new CancellationTokenSource();
        Console.CancelKeyPress += (sender, key) =>
        {
            key.Cancel = true; // we end by ourselves, with everything given back
            stop.Cancel();
        };
        var options = new RunOptions { Progress = new Line() };
        using (var vae = new Vae(checkpoint))
        {
            vae.Configure("memory_limit", "8GiB");
            VaeModel model = vae.Model;
            Console.WriteLine($"{model.Family}: {model.PixelChannels} pixel channels, {model.LatentChannels} latent channels, "
                              + $"1 latent pixel for {model.SpatialScale} x {model.SpatialScale}, 1 latent frame for {model.TimeScale}");
            Console.WriteLine($"its diffusion model reads {Scaling(model)}");
            long channels = model.PixelChannels;
            TensorLayout pixels = TensorLayout.Interleaved(frames, height, width, channels);
            byte[] clip = MakeClip(frames, height, width, channels), back = new byte[clip.Length];

            VaePlan plan = vae.Plan("encode", pixels.Shape);
            Console.WriteLine(plan);
            var latent = new float[plan.Output.Elements];
            vae.Encode(clip, pixels, latent, plan.Output, options, stop.Token);
            Console.WriteLine(vae.Plan("decode", plan.Output));
            vae.Decode(latent, plan.Output, back, pixels, options, stop.Token);

            double squares = clip.Zip(back, (a, b) => (double)(a - b) * (a - b)).Sum();
            double quality = 10 * Math.Log10(255.0 * 255.0 * clip.Length / squares);
            Console.WriteLine($"\n{quality:F1} dB between the clip and what came back; at most {vae.Memory.Peak >> 20} MiB were held");
        }
        return 0;
    }

    private static string Scaling(VaeModel model)
    {
        VaeLatents latents = model.Latents;
        if (latents == null) return $"latents of {string.Join(" or ", model.LatentFormats)}: latent_format says which";
        string packed = latents.Packing > 1 ? $", {latents.Packing} x {latents.Packing} pixels packed into one" : "";
        string scaled = latents.Means.Count > 0
            ? $"(z - mean) / deviation of each, first {latents.Means[0]:G4} and {latents.Deviations[0]:G4}"
            : $"(z - {latents.Shift}) * {latents.Scale}";
        return $"{latents.Channels} channels{packed}, {scaled} ({latents.Format})";
    }

    /// <summary>A gradient that drifts, opaque where a model has alpha.</summary>
    private static byte[] MakeClip(long frames, long height, long width, long channels)
    {
        var clip = Enumerable.Repeat((byte)255, (int)(frames * height * width * channels)).ToArray();
        for (long i = 0; i < clip.Length; i += channels)
        {
            long pixel = i / channels, x = pixel % width, y = pixel / width % height, t = pixel / width / height;
            clip[i] = (byte)(255 * x / width);
            clip[i + 1] = (byte)(255 * y / height);
            clip[i + 2] = (byte)(128 + 8 * t);
        }
        return clip;
    }

    /// <summary>Told on the thread of the run. Progress&lt;T&gt; would do in a program with a window.</summary>
    private sealed class Line : IProgress<VaeProgress>
    {
        public void Report(VaeProgress value)
        {
            Console.Error.Write($"\r{value.Stage} {100 * value.Fraction:F0}% ");
        }
    }
}
