package org.ondevice.app

import android.app.AlertDialog
import android.content.Intent
import android.graphics.Bitmap
import android.graphics.Canvas
import android.net.Uri
import android.os.BatteryManager
import android.os.Looper
import android.view.View
import android.view.ViewGroup
import android.widget.TextView
import org.junit.After
import org.junit.Before
import org.junit.runner.RunWith
import org.ondevice.core.PipeProgram
import org.ondevice.core.Program
import org.ondevice.core.Rules
import org.ondevice.core.Tensor
import org.robolectric.Robolectric
import org.robolectric.RobolectricTestRunner
import org.robolectric.RuntimeEnvironment
import org.robolectric.Shadows.shadowOf
import org.robolectric.android.controller.ActivityController
import org.robolectric.annotation.Config
import org.robolectric.annotation.GraphicsMode
import org.robolectric.shadows.ShadowDialog
import java.io.ByteArrayInputStream
import java.io.File
import java.io.FileOutputStream
import java.util.concurrent.CountDownLatch
import java.util.zip.ZipEntry
import java.util.zip.ZipOutputStream

/**
 * What the tests of the screens share. The framework is Android's own code and draws real pictures; the program
 * is a real exported one, run by Python's ExecuTorch. Only battery and heat are made up.
 */
@RunWith(RobolectricTestRunner::class)
@GraphicsMode(GraphicsMode.Mode.NATIVE)
@Config(sdk = [34], qualifiers = AppTest.PHONE)
abstract class AppTest {
    protected val app: OndeviceApp get() = RuntimeEnvironment.getApplication() as OndeviceApp
    protected lateinit var controller: ActivityController<MainActivity>
    protected val activity: MainActivity get() = controller.get()

    @Before
    fun healthyPhone() {
        app.openProgram = { Shared }
        battery(80, charging = false)
    }

    /** A run that a failed test left behind must not go on into the next. */
    @After
    fun endRun() {
        gates.forEach { it.goOn() }
        val trainer = app.runs.live?.trainer ?: return
        trainer.stop()
        trainer.resume()
        until("the run to end") { app.runs.live?.isOver != false }
    }

    protected fun open(tab: Int = 0): MainActivity {
        val intent = Intent(app, MainActivity::class.java).putExtra(MainActivity.TAB, tab)
        controller = Robolectric.buildActivity(MainActivity::class.java, intent).setup()
        settle()
        return activity
    }

    /** A fixture's artifact, as if the user had imported it. */
    protected fun importModel(name: String = "film reviews", folder: File = artifact) {
        app.store.library.importZip(ByteArrayInputStream(zip(folder)), name)
    }

    protected fun importData(name: String = "reviews.jsonl") {
        File(fixtures, "train.jsonl").inputStream().use { app.store.importData(name, it) }
    }

    /** Start a run as the train screen does, with the service that belongs to it. */
    protected fun begin(steps: Int, rules: Rules = Rules(), id: String = Runs.newId()) {
        val data = app.store.nameOf(app.store.trainable()[0])
        app.runs.begin(RunPlan(id, app.store.models()[0].name, data, steps, 0.01, rules))
        service()
    }

    /** Deliver the intents that were sent to the service, and keep it. */
    protected fun service(action: String? = null): TrainService {
        val running = trainService ?: Robolectric.buildService(TrainService::class.java).create().get().also { trainService = it }
        running.onStartCommand(TrainService.intent(app, action), 0, 1)
        return running
    }

    protected var trainService: TrainService? = null

    protected fun battery(percent: Int, charging: Boolean, celsius: Double = 31.5) {
        @Suppress("DEPRECATION")
        app.sendStickyBroadcast(
            Intent(Intent.ACTION_BATTERY_CHANGED).putExtra(BatteryManager.EXTRA_LEVEL, percent).putExtra(BatteryManager.EXTRA_SCALE, 100)
                .putExtra(BatteryManager.EXTRA_PLUGGED, if (charging) BatteryManager.BATTERY_PLUGGED_USB else 0)
                .putExtra(BatteryManager.EXTRA_TEMPERATURE, (celsius * 10).toInt()),
        )
        settle()
    }

    protected fun settle() = shadowOf(Looper.getMainLooper()).idle()

    /** Let the other threads work until [done], or fail with [what] was waited for. */
    protected fun until(what: String, seconds: Int = 60, done: () -> Boolean) {
        val end = System.nanoTime() + seconds * 1_000_000_000L
        while (true) {
            settle()
            if (done()) return
            if (System.nanoTime() > end) throw AssertionError("waited $seconds s for $what; the screen says:\n${if (::controller.isInitialized) texts() else ""}")
            Thread.sleep(10)
        }
    }

    /** Wait until the screen says all of [words]: it is told a moment after a state has changed, by another thread. */
    protected fun untilSaid(vararg words: String) = until(words.joinToString()) { texts().let { said -> words.all { it in said } } }

    protected inline fun <reified T : View> find(id: Int): T =
        activity.findViewById(id) ?: throw AssertionError("no view ${app.resources.getResourceEntryName(id)}; the screen says:\n${texts()}")

    protected fun click(id: Int) {
        val view = find<View>(id)
        if (!view.isEnabled) throw AssertionError("${app.resources.getResourceEntryName(id)} is switched off")
        view.performClick()
        settle()
    }

    /** Click what says [words]. */
    protected fun click(words: String) {
        val view = views(activity.window.decorView).firstOrNull { it.isClickable && (it.contentDescription == words || (it as? TextView)?.text?.toString() == words) }
            ?: throw AssertionError("nothing to click says '$words'; the screen says:\n${texts()}")
        view.performClick()
        settle()
    }

    /** Say yes to the question that is asked now. */
    protected fun confirm(): String {
        val dialog = ShadowDialog.getLatestDialog() as? AlertDialog ?: throw AssertionError("no question is asked")
        val question = shadowOf(dialog).message.toString()
        dialog.getButton(AlertDialog.BUTTON_POSITIVE).performClick()
        settle()
        return question
    }

    /** Everything that can be read on the screen. */
    protected fun texts(): String = views(activity.window.decorView).filterIsInstance<TextView>().filter { it.isShown }.joinToString("\n") { it.text }

    protected fun views(view: View): List<View> =
        listOf(view) + if (view is ViewGroup) (0 until view.childCount).flatMap { views(view.getChildAt(it)) } else emptyList()

    protected fun rotate(qualifiers: String = LANDSCAPE) {
        RuntimeEnvironment.setQualifiers(qualifiers)
        controller.configurationChange().visible()
        settle()
    }

    /** What the picker gives: a document with these bytes. */
    protected fun pick(request: Int, name: String, bytes: ByteArray) {
        val uri = Uri.parse("content://documents/$name")
        shadowOf(app.contentResolver).registerInputStream(uri, ByteArrayInputStream(bytes))
        activity.screen.onPicked(request, uri)
    }

    /** The screen as a picture, under build/screens. */
    protected fun shot(name: String) {
        settle()
        val root = activity.window.decorView
        val picture = Bitmap.createBitmap(root.width, root.height, Bitmap.Config.ARGB_8888)
        root.draw(Canvas(picture))
        val colours = (0 until root.height step 7).flatMap { y -> (0 until root.width step 7).map { x -> picture.getPixel(x, y) } }.distinct()
        if (colours.size < 8) throw AssertionError("the picture of $name is empty: ${colours.size} colours")
        val file = File(property("ondevice.screens"), "$name.png")
        file.parentFile!!.mkdirs()
        FileOutputStream(file).use { picture.compress(Bitmap.CompressFormat.PNG, 100, it) }
    }

    /** The program as it is, which waits before its step number [step] (from 0) until `goOn`: a run then stands where the test wants it. */
    protected class Gate(private val step: Int) : Program by Shared {
        private val released = CountDownLatch(1)
        private var steps = 0

        fun goOn() = released.countDown()

        override fun execute(method: String, inputs: List<Tensor>, layer: Int): List<Tensor> {
            if (method.startsWith("train_step") && steps++ == step) released.await()
            return Shared.execute(method, inputs, layer)
        }
    }

    /** One gate for the runs that begin from now on. */
    protected fun gate(step: Int): Gate = Gate(step).also { gate -> app.openProgram = { gate }; gates.add(gate) }

    private val gates = ArrayList<Gate>()

    /** One Python for all tests: the program keeps nothing between two calls. */
    private object Shared : Program {
        private val pipe by lazy { PipeProgram(artifact, property("ondevice.python"), File(property("ondevice.root")).canonicalFile) }

        @Synchronized
        override fun execute(method: String, inputs: List<Tensor>, layer: Int) = pipe.execute(method, inputs, layer)

        override fun close() = Unit
    }

    companion object {
        const val PHONE = "w360dp-h720dp-xhdpi"
        const val LANDSCAPE = "w720dp-h360dp-land-xhdpi"

        fun property(name: String): String = System.getProperty(name) ?: throw AssertionError("run the tests with mvn; the property $name is not set")

        val fixtures: File by lazy {
            File(property("ondevice.fixtures")).also {
                if (!File(it, "numbers.json").isFile) throw AssertionError("the fixtures are missing in $it; try: make -C android_app fixtures")
            }
        }
        val artifact: File by lazy { fixtures.let { File(property("ondevice.artifact")) } }

        fun zip(folder: File): ByteArray = java.io.ByteArrayOutputStream().also { out ->
            ZipOutputStream(out).use { zip ->
                for (file in folder.walk().filter { it.isFile }) {
                    zip.putNextEntry(ZipEntry(file.relativeTo(folder).invariantSeparatorsPath))
                    file.inputStream().use { it.copyTo(zip) }
                }
            }
        }.toByteArray()
    }
}
