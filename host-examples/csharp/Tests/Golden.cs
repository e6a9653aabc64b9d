using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Text;
using System.Text.RegularExpressions;
using VideoVae;

/// <summary>The f32 tensors of a golden file, by name.</summary>
internal sealed class Golden
{
    private readonly Dictionary<string, Shape> shapes = new Dictionary<string, Shape>();
    private readonly Dictionary<string, float[]> values = new Dictionary<string, float[]>();

    public Golden(string path)
    {
        byte[] file = File.ReadAllBytes(path);
        int header = (int)BitConverter.ToInt64(file, 0);
        // Names, and objects without objects in them: all that these headers have.
        foreach (Match entry in Regex.Matches(Encoding.UTF8.GetString(file, 8, header), "\"(\\w+)\": *(\\{[^{}]*\\})"))
        {
            long[] shape = Numbers(entry.Groups[2].Value, "shape");
            long[] ends = Numbers(entry.Groups[2].Value, "data_offsets");
            if (shape.Length != 5) continue;
            var floats = new float[(ends[1] - ends[0]) / 4];
            Buffer.BlockCopy(file, 8 + header + (int)ends[0], floats, 0, floats.Length * 4);
            shapes[entry.Groups[1].Value] = new Shape(shape[0], shape[1], shape[2], shape[3], shape[4]);
            values[entry.Groups[1].Value] = floats;
        }
    }

    public Shape Shape(string name)
    {
        return shapes[name];
    }

    public float[] Values(string name)
    {
        return values[name];
    }

    private static long[] Numbers(string entry, string name)
    {
        string list = Regex.Match(entry, $"\"{name}\": *\\[([^\\]]*)\\]").Groups[1].Value;
        return list.Split(new[] { ',' }, StringSplitOptions.RemoveEmptyEntries).Select(long.Parse).ToArray();
    }
}
